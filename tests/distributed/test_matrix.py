"""The quick subset of the matrix, started as a user starts it, and what the matrix does when a cell ends its ranks."""

import json
import sys
from pathlib import Path

import pytest

from ds_parity.parity.matrix import cell_runs as running
from ds_parity.parity.matrix.cells import Cell, cells
from ds_parity.parity.matrix.variant import Variant
from ds_parity.parity.running.launch import Call
from tests.beside import Errand, begun_with_the_session

# Slow, because what people train with every day has tests of its own: the matrix tells what else is right.
pytestmark = [pytest.mark.ranks, pytest.mark.slow]
QUICK = cells(quick=True)
HERE = str(Path(__file__).parent)


@begun_with_the_session("quick")
def quick_matrix(folder, _):
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "ds_parity", "verify", "--matrix", "quick", "--json", "--out", str(folder)]
    return Errand("subprocess:run", (command,), {"capture_output": True, "text": True, "timeout": 1200})


@pytest.fixture(scope="session")
def quick(begun):
    """The run's exit code, its cells by name and stage, and the folder."""
    folder, ran = begun.folder_of("quick"), begun.result("quick")
    assert ran.stdout, ran.stderr
    report = json.loads(ran.stdout)
    return ran.returncode, {(cell["group"], cell["name"], cell["stage"]): cell for cell in report["cells"]}, folder


@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: cell.name)
def test_a_cell_is_right_where_deepspeed_is_not_too(quick, cell):
    result = quick[1][cell.variant.group, cell.variant.name, cell.stage]
    assert result["status"] == ("corrected" if cell.stage in cell.variant.faults else "right"), result
    sound = [finding["check"] for finding in result["findings"] if finding["status"] in ("right", "corrected")]
    assert sound == [*cell.checks()]


def test_the_run_passes_and_leaves_its_report(quick):
    code, result, folder = quick
    assert code == 0
    assert len(result) == len(QUICK)
    assert "PASS" in (folder / "matrix" / "matrix.html").read_text()
    assert "| fp32 | right | right | right | right |" in (folder / "matrix" / "matrix.md").read_text()
    assert json.loads((folder / "matrix" / "matrix.json").read_text())["equal"] is True


def test_a_cell_that_ends_its_ranks_costs_no_other_its_answer(tmp_path, monkeypatch):
    """One cell kills a rank, one hangs; those before and behind them are answered."""
    names = ["first", "killed", "between", "hangs", "last"]
    functions = {"killed": "launched:die", "hangs": "launched:hang"}
    arguments = {"killed": {"rank": 1}, "hangs": {}}
    made = [Cell(Variant("precision", name), 2) for name in names]

    def calls_of(cell, folder):
        name = cell.variant.name
        return (Call(name, functions.get(name, "launched:answer"), arguments.get(name, {})),)

    monkeypatch.setattr(running, "calls_of", calls_of)
    monkeypatch.setenv("PYTHONPATH", str(Path(HERE).parent / "parity"))
    answers = running.run_cells(made, tmp_path, patience=20)
    assert list(answers) == names
    assert [name for name in names if "raised" in answers[name]] == ["killed", "hangs"]
    assert "ended" in answers["killed"]["raised"]
    assert "they hang" in answers["hangs"]["raised"]
