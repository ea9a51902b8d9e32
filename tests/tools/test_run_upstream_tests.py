"""The tool that runs DeepSpeed's own tests, on a small checkout of one's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_parity.config import parse
from tools import run_upstream_tests
from tools.run_upstream_tests import Outcome
from tools.upstream.replaced import keyed, uniform_passes

TOOLS = Path(__file__).parents[2] / "tools"

FILE = """
import os, time, pytest
from ds_parity.errors import WindowError

MODE = os.environ["DS_PARITY_UPSTREAM"]

def test_passes(): pass

def test_fails_bare(): assert MODE != "bare"

def test_fails_always(): raise AssertionError

@pytest.mark.skip(reason="no such device")
def test_skipped(): pass

def test_crashes(): os._exit(3)

def test_hangs():
    if MODE == "bare": time.sleep(3600)

def test_refused_with_the_key():
    if MODE == "keyed": raise WindowError("refused, and why")

def test_refused_without_the_key():
    if MODE == "plain": raise WindowError("never allowed")

def test_wrong_with_the_key(): assert MODE != "keyed"

def test_after_all_of_them(): pass
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the tool wrote about FILE, and how it ended."""
    folder = tmp_path_factory.mktemp("upstream")
    unit = folder / "source" / "tests" / "unit"
    unit.mkdir(parents=True)
    (unit / "test_it.py").write_text(FILE)
    (unit / "test_not_importable.py").write_text("import nothing_of_that_name")
    # Without building operators, which takes minutes.
    script = "import run_upstream_tests as tool; tool.BUILD_OPS = ''; tool.PATIENCE = 0; raise SystemExit(tool.main())"
    where = [str(folder / "source"), "unit", "--timeout", "8", "--json", str(folder / "out" / "report.json")]
    ended = subprocess.run(
        [sys.executable, "-c", script, *where],
        cwd=TOOLS,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return json.loads((folder / "out" / "report.json").read_text()), ended


def statuses(report, name):
    outcomes = next(by_mode for test, by_mode in report[0]["outcomes"].items() if test.endswith(name))
    return [outcomes[mode]["status"] for mode in ("bare", "plain", "keyed")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_passes", ["passed"] * 3),
        ("test_fails_bare", ["failed", "passed", "passed"]),
        ("test_fails_always", ["failed"] * 3),
        ("test_skipped", ["skipped"] * 3),
        ("test_crashes", ["crashed"] * 3),
        ("test_hangs", ["hung", "passed", "passed"]),
        ("test_refused_with_the_key", ["passed", "passed", "failed"]),
        ("test_refused_without_the_key", ["passed", "failed", "passed"]),
        ("test_wrong_with_the_key", ["passed", "passed", "failed"]),
        ("test_after_all_of_them", ["passed"] * 3),
        ("test_not_importable.py", ["error"] * 3),
    ],
)
def test_every_test_has_its_outcome_in_every_mode_though_others_crash_and_hang(report, name, expected):
    assert statuses(report, name) == expected


@pytest.mark.slow
def test_a_refusal_of_ds_parity_is_set_apart_with_its_reason(report):
    assert report[0]["refused"] == {
        "keyed unit/test_it.py::test_refused_with_the_key": "WindowError: refused, and why",
    }


@pytest.mark.slow
def test_everything_else_that_ends_otherwise_differs(report):
    named = {test.rpartition("::")[2] for test in report[0]["differs"]}
    assert named == {"test_fails_bare", "test_hangs", "test_refused_without_the_key", "test_wrong_with_the_key"}
    assert report[1].returncode == 1
    assert "FAIL: 4 outcomes differ; 1 refused by ds_parity" in report[1].stdout


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ("sleep 1.5; echo collected > lines", "pytest ended with code 0"),
        ("echo collected > lines; sleep 60", "no sign of life in 1 s"),
        ("sleep 60", "no sign of life in 3 s"),
    ],
)
def test_collecting_may_take_longer_than_a_test(tmp_path, monkeypatch, script, ended):
    """On a busy machine importing torch took longer than a test may: all tests of that file were without an outcome."""
    monkeypatch.setattr(run_upstream_tests, "COLLECTING", 3)
    (tmp_path / "lines").touch()
    process = subprocess.Popen(["sh", "-c", f"exec 2>&1; {script}"], cwd=tmp_path, start_new_session=True)
    try:
        assert run_upstream_tests._wait(process, tmp_path / "lines", 1) == ended
    finally:
        run_upstream_tests._kill(process)


def test_a_path_without_tests_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tool", str(tmp_path)])
    assert run_upstream_tests.main() == 2
    assert "give a DeepSpeed checkout" in capsys.readouterr().err


class TestUniformPasses:
    """The batch triple is filled in as DeepSpeed does."""

    @pytest.mark.parametrize(
        ("batch", "micro", "steps", "expected"),
        [
            (12, 2, 3, 6),
            (12, 2, None, 6),
            (12, None, 3, 6),
            (None, 2, 3, 6),
            (12, None, None, 2),
            (None, 2, None, 2),
            (13, 2, 3, None),
            (None, None, 3, None),
            (None, None, None, None),
            (1, 2, None, None),
            ("auto", 2, 3, None),
        ],
    )
    def test_with_2_ranks(self, batch, micro, steps, expected):
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = {name: value for name, value in zip(names, (batch, micro, steps), strict=True) if value is not None}
        assert uniform_passes(given, 2) == expected


def test_the_key_is_worked_out_from_the_configuration_and_the_ranks(monkeypatch):
    """It goes through the function that initialize() itself asks for the data-parallel size."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *group: 4)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}
    given = keyed({"model": None, "config": config})
    assert given["config"] == {**config, "gradient_accumulation_passes": 12}
    # Accumulation steps of DeepSpeed's own divide its losses, so the caller's boundary stays away from them.
    assert keyed({"model": None, "config": config}, "caller")["config"] == config
    given = keyed({"model": None, "config": {"train_batch_size": 8}}, "caller")
    assert given["config"]["train_micro_batch_size_per_gpu"] == 2
    assert parse(given["config"]).by_caller


SUM = "unit/v1/zero/test_zero.py::TestGradientAllreduceOp::test[True-True-False-1.0-{}-2.0-1]"
HALF = "Greatest relative difference: 0.5 at index (0,)"


@pytest.mark.parametrize(
    ("test", "message", "by_definition"),
    [
        (SUM.format("sum"), HALF, True),
        (SUM.format("sum"), "Greatest relative difference: 0.51 at index (0,)", False),
        (SUM.format("mean"), HALF, False),
        (SUM.format("sum").replace("AllreduceOp", "AllreduceOpTraining"), HALF, False),
    ],
)
def test_only_what_the_key_replaces_departs_by_definition_and_only_by_what_it_must(test, message, by_definition):
    report = run_upstream_tests.Report({})
    outcomes = {"bare": Outcome("passed"), "keyed": Outcome("failed", message), "plain": Outcome("failed", message)}
    for mode in ("plain", "keyed"):
        run_upstream_tests._classify(report, test, mode, outcomes)
    assert list(report.defined) == [f"keyed {test}"] * by_definition
    assert f"plain {test}" in report.differs, "without the key nothing departs"
    assert (f"keyed {test}" in report.differs) == (not by_definition)
