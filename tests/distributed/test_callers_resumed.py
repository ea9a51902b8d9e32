"""A run whose caller ends windows goes on from a checkpoint, on as many ranks and on others, as if it had not ended."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.report.terminal import verdict
from ds_parity.parity.running.recording import Recorder
from ds_parity.parity.running.scenario import Scenario
from ds_parity.trace import read_trace
from tests.distributed.cells import TINY
from tests.distributed.continuing import AFTER, BEFORE, Run, converted, ends_in, extended, name_of, passes_of, stands
from tests.distributed.engines import from_all
from tests.distributed.sets import on_four_ranks, on_one_rank, on_two_ranks

pytestmark = pytest.mark.ranks

CONVERTED = [(1, "fp32", {}), (1, "bf16-fp32", {}), (2, "bf16", {}), (3, "fp32", {})]
CELLS = [(0, "fp32", {}), *CONVERTED]
ENDS = (3, 4, 9, 12)
"""After how many passes of the run the caller ends its windows: no two that follow each other hold as much."""


class CallersRun(Run):
    """The same over windows that end where the caller says."""

    def one(self, index):
        """Run pass `index`, and end the window where it is due."""
        batch, engine = self.batches[index], self.engine
        if batch.rollouts:
            counts = {"rollouts": batch.rollouts, "prompts": batch.prompts, "tokens": batch.tokens}
            engine.backward(engine(**batch.inputs), **counts)
        else:
            engine.idle(engine(**self.idle.inputs))
        if passes_of(engine) in ENDS:
            engine.step()


def scenario_of(cell, ranks=2):
    """Rollouts of several windows of a run by counts, which this one ends elsewhere."""
    by_counts = Scenario(name_of(*cell), extended(*cell), ranks, shape="overshoot", windows=4, seed=3, **TINY)
    # The nominal target stays, by which the schedule's progress is divided.
    return replace(by_counts, config=extended(*cell, boundary="caller"))


@on_two_ranks
def callers_continued(folder):
    """A run that is saved after two windows, one that goes on from there, and one that was inside a window."""
    results = {}
    for cell in CELLS:
        name, scenario = name_of(*cell), scenario_of(cell)
        path = f"{folder}/{name}"
        run, other = CallersRun(scenario), CallersRun(scenario)
        run.windows(BEFORE)
        saved = stands(run.engine)
        run.engine.save_checkpoint(path)
        with Recorder(Path(folder) / "traces", scenario, "ds_parity") as recorder:
            whole = run.windows(AFTER, recorder)
        alike = []
        for _ in range(2):
            other.engine.load_checkpoint(path)
            alike.append(stands(other.engine) == saved and other.windows(AFTER) == whole)
            other.one(0)
        results[name] = {
            "saved": saved,
            "steps": [step["rollouts"] for step, *_ in whole],
            "alike": alike,
            "open": other.engine.window.passes,
            "converted": converted(path) if cell in CONVERTED else None,
        }
        run.engine.destroy()
        other.engine.destroy()
    return results


@on_one_rank.after(saved=callers_continued)
@on_four_ranks.after(saved=callers_continued)
def callers_elsewhere(folder, saved):
    """Go on from what two ranks saved, as universal checkpoints but for ZeRO 0, and trace it."""
    results = {}
    for cell in CELLS:
        scenario = scenario_of(cell, dist.get_world_size())
        section = {"checkpoint": {"load_universal": True}} if cell in CONVERTED else {}
        run = CallersRun(scenario, {**scenario.config, **section})
        said = ends_in(lambda run=run, cell=cell: run.engine.load_checkpoint(f"{saved}/{name_of(*cell)}"))
        results[name_of(*cell)] = {"said": from_all(said), "stands": stands(run.engine)}
        with Recorder(Path(folder), scenario, "ds_parity") as recorder:
            run.windows(AFTER, recorder)
        run.engine.destroy()
    return results


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: name_of(*cell))
class TestARunWhoseCallerEndsWindows:
    def test_goes_on_bit_for_bit_on_as_many_ranks(self, two_ranks, cell):
        result = two_ranks.of(callers_continued)[name_of(*cell)]
        assert result["alike"] == [True, True]
        assert result["open"] == 1, "no window was open where it was loaded"
        assert len(set(result["steps"])) == AFTER, "the windows hold as much as each other"

    def test_goes_on_but_for_rounding_on_one_rank_and_on_four(self, two_ranks, other_ranks, cell):
        ranks, launched = other_ranks
        result = launched.of(callers_elsewhere)[name_of(*cell)]
        assert result["said"] == ["nothing was raised"] * ranks
        assert result["stands"] == two_ranks.of(callers_continued)[name_of(*cell)]["saved"]
        folders = two_ranks.folder_of(callers_continued) / "traces", launched.folder_of(callers_elsewhere)
        reference, candidate = (read_trace(folder / name_of(*cell) / "ds_parity.jsonl") for folder in folders)
        comparison = compare(reference, candidate, Tier.REASSOCIATED, scenario_of(cell).dtype)
        assert comparison.equal, verdict(comparison)
        for field in ("step", "lr", "passes", "rollouts", "tokens"):
            assert [getattr(step, field) for step in candidate.steps] == [
                getattr(step, field) for step in reference.steps
            ]


def test_checkpoints_become_universal_ones(two_ranks):
    results = two_ranks.of(callers_continued)
    assert [results[name_of(*cell)]["converted"] for cell in CONVERTED] == ["nothing was raised"] * len(CONVERTED)
