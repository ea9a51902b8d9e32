"""What a type checker, and so an editor, knows of the names that users import."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A training loop as a user writes it. Its last lines are wrong, and must be seen to be: an engine of type Any hides it.
LOOP = """
from collections.abc import Iterator
from typing import Any, assert_type

import torch

import ds_parity
from ds_parity.trace import StepRecord
from ds_parity.window import Window

stream: list[ds_parity.MicroBatch] = []
engine, optimizer, loader, scheduler = ds_parity.initialize(model=torch.nn.Linear(1, 1), config="ds_config.json")
assert_type(engine, ds_parity.ParityEngine)
assert_type(engine.passes(stream), Iterator[ds_parity.MicroBatch])
for micro_batch in engine.passes(stream):
    assert_type(micro_batch.tokens, int)
    loss = engine(**micro_batch.inputs)
    assert_type(engine.backward(loss, tokens=torch.ones(3).sum()), torch.Tensor)
    engine.record("reward", 1.0)
    engine.step()
assert_type(engine.finish(), StepRecord | None)
assert_type(engine.last_step, StepRecord | None)
assert_type(engine.window, Window)
assert_type(engine.stopping, bool)
assert_type(engine.module, Any)  # DeepSpeed's own
assert_type(engine.train_batch_size(), Any)
engine.record(1.0, "reward")  # wrong
engine.passes(stream, look_ahead=2)  # wrong
engine.last_step.loss  # wrong
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The lines of mypy's report on LOOP, checked as the package is."""
    pytest.importorskip("mypy", reason="the extra dev has mypy")
    path = tmp_path_factory.mktemp("types") / "loop.py"
    path.write_text(LOOP)
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--no-error-summary", path]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert not report.stderr
    return report.stdout.splitlines()


def lines(found):
    return [int(line.split(":")[1]) for line in found if ": error: " in line]


@pytest.mark.slow
def test_an_engine_has_types_and_what_is_deepspeeds_own_has_none(found):
    wrong = [number for number, line in enumerate(LOOP.splitlines(), 1) if line.endswith("# wrong")]
    assert lines(found) == wrong, "\n".join(found)


def test_the_package_says_that_it_has_types():
    assert (ROOT / "ds_parity" / "py.typed").exists()
    assert "py.typed" in (ROOT / "setup.cfg").read_text()
