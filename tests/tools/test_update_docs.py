"""Tables are put between their marks, and nothing else of a page is touched."""

import json
import os
import subprocess
import sys

import pytest

from ds_parity.errors import DsParityError
from tools import update_docs

PAGE = "before\n<!-- matrix: made by `make matrix` -->\nold\n<!-- matrix: end -->\nbehind\n"


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(update_docs, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_table_takes_the_place_of_the_one_before(page):
    update_docs.put(page, "matrix", "| new |\n| again |\n")
    assert page.read_text() == PAGE.replace("old\n", "| new |\n| again |\n")
    assert update_docs.shown(page, "matrix") == "| new |\n| again |\n"


@pytest.mark.parametrize("text", ["without marks", PAGE + PAGE])
def test_marks_that_are_not_there_once_are_refused(page, text):
    page.write_text(text)
    with pytest.raises(DsParityError, match="must stand there once each"):
        update_docs.put(page, "matrix", "new\n")
    assert page.read_text() == text


def test_the_readme_shows_the_counts_of_the_matrix_alone(tmp_path):
    source = tmp_path / "matrix.md"
    source.write_text("8 cells: 7 right, 1 refused (deepspeed 0.19.8).\n\n| | ZeRO 0 |\n")
    shown = {path.name: text for path, text in update_docs.made_from_runs("matrix", source)}
    assert shown == {"matrix.md": source.read_text(), "README.md": "8 cells: 7 right, 1 refused.\n"}


@pytest.mark.parametrize("start", [["tools/update_docs.py"], ["-m", "tools.update_docs"]])
def test_it_starts_as_a_file_and_as_a_module(start):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *start, "--help"]
    ran = subprocess.run(
        command, cwd=update_docs.ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "pages" in ran.stdout


def finding(engine, caught, causes=(), **others):
    return {"engine": engine, "clean": False, "caught": caught, "causes": [{"name": name} for name in causes], **others}


def test_the_controls_are_counted_for_each_configuration(tmp_path):
    """A fault that is taken for one with the same traces is named; one that is missed is not."""
    found = [
        finding("clean", caught=False, clean=True),
        finding("ds_parity", caught=True, clean=True),
        finding("step-per-pass", caught=True, causes=("step-per-pass", "local-count")),
        finding("local-count", caught=True, causes=("step-per-pass", "local-count")),
        finding("idle-nan", caught=False),
    ]
    summary = "2 of 3 faults caught; the weakest signal over the greatest noise: 12,345 in loss, 999 in weights"
    for name, said in (("zero2_fp32.json", summary), ("zero2_bf16.json", "nothing to compare")):
        (tmp_path / name).write_text(json.dumps({"summary": said, "findings": found}))
    ((page, table),) = update_docs.made_from_runs("controls", tmp_path)
    assert page.name == "harness.md"
    assert table.splitlines()[2:] == [
        "| `zero2_bf16.json` | 2 of 3 | 1 | 1 of 2 | - |",
        "| `zero2_fp32.json` | 2 of 3 | 1 | 1 of 2 | 999 |",
    ]
