"""A run that is continued, on as many ranks and on others, is the run that never ended."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.report.terminal import verdict
from ds_parity.parity.running.recording import Recorder
from ds_parity.trace import read_trace
from tests.distributed.cells import STAGES
from tests.distributed.continuing import (
    AFTER,
    BEFORE,
    CELLS,
    CONVERTED,
    Run,
    converted,
    cpu_adam,
    ends_in,
    fp32_weights,
    name_of,
    scenario_of,
    stands,
)
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks, by_length, on_four_ranks, on_one_rank, on_two_ranks

pytestmark = pytest.mark.ranks


# What goes on elsewhere, too. A cell takes about 4 s: the other ones are for `make test-slow`.
ALWAYS = [(0, "fp32", {}), *CONVERTED]
AT_LENGTH = [cell for cell in CELLS if cell not in ALWAYS]


@on_two_ranks
def continued(folder):
    """A run, and two that go on from its checkpoint: in a fresh engine, and in one that stands inside a window.

    What the run is from the checkpoint on is traced, and the checkpoint converted, for other numbers of ranks.
    """
    return _continued(folder, ALWAYS)


@at_length_on_two_ranks
def continued_at_length(folder):
    """The same of the other cells."""
    return _continued(folder, AT_LENGTH)


def _continued(folder, cells):
    results = {}
    for cell in cells:
        name, scenario = name_of(*cell), scenario_of(cell)
        path = f"{folder}/{name}"
        run = Run(scenario)
        run.windows(BEFORE)
        saved, masters = stands(run.engine), fp32_weights(run.engine)
        run.engine.save_checkpoint(path)
        with Recorder(Path(folder) / "traces", scenario, "ds_parity") as recorder:
            whole = run.windows(AFTER, recorder)
        other, loaded, resumed = Run(scenario), [], []
        for state in ("fresh", "used"):
            other.engine.load_checkpoint(path)
            loaded.append(stands(other.engine))
            with Recorder(Path(folder) / "traces", scenario, state) as recorder:
                resumed.append(other.windows(AFTER, recorder))
            other.one(0)
        results[name] = {
            "saved": saved,
            "loaded": loaded,
            "alike": [resumed[0] == whole, resumed[1] == resumed[0]],
            "open": other.engine.window.passes,
            "from zero": collected(path, masters) if cell[0] else None,
            "converted": converted(path) if cell in CONVERTED else None,
        }
        run.engine.destroy()
        other.engine.destroy()
    return results


def collected(path, masters):
    """Whether DeepSpeed's own collector of fp32 weights gives those that the engine had, or what it says instead."""
    dist.barrier()
    if dist.get_rank():
        return None
    try:
        state = get_fp32_state_dict_from_zero_checkpoint(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return sorted(state) == sorted(masters) and all(torch.equal(state[name], masters[name]) for name in masters)


def _marked(cells):
    return by_length(
        [cell for cell in cells if cell not in AT_LENGTH], [cell for cell in cells if cell in AT_LENGTH], "two_ranks"
    )


@pytest.fixture
def of_cell(request, cell):
    """What a cell's run has left, and the folder of its traces."""
    fixture, task = ("two_ranks_at_length", continued_at_length) if cell in AT_LENGTH else ("two_ranks", continued)
    launched = request.getfixturevalue(fixture)
    return launched.of(task)[name_of(*cell)], launched.folder_of(task) / "traces" / name_of(*cell)


@pytest.mark.parametrize("cell", _marked(CELLS), ids=lambda cell: name_of(*cell))
class TestARunThatIsContinued:
    def test_is_saved_with_a_surplus_pending_and_fractional_progress(self, of_cell):
        saved = of_cell[0]["saved"]
        assert saved["window"] == [2, 9]
        assert saved["progress"] == 27 / 12
        assert saved["clocks"][:2] == [2, 27]
        assert [decay for _, decay in saved["groups"]] == [0.1, 0.0]

    def test_stands_where_it_was_saved_in_a_fresh_engine_and_in_one_inside_a_window(self, of_cell):
        result, _ = of_cell
        assert result["loaded"] == [result["saved"]] * 2
        assert result["open"] == 1, "no window was open where it was loaded"

    def test_goes_on_bit_for_bit(self, of_cell, cell):
        """Boundaries, loss, LR, gradient norm, weights, the schedule's state and every counter.

        DeepSpeedCPUAdam computes beta ** steps by one power after loading, and by a running product before: both runs
        that were continued are alike bit for bit, and off the one that was not by rounding.
        """
        result, folder = of_cell
        as_the_run, as_each_other = result["alike"]
        assert as_each_other
        assert as_the_run or cpu_adam(cell)
        if not as_the_run:
            traces = [read_trace(folder / f"{state}.jsonl") for state in ("ds_parity", "fresh")]
            comparison = compare(*traces, Tier.REASSOCIATED, scenario_of(cell).dtype)
            assert comparison.equal, verdict(comparison)
            assert [step.lr for step in traces[0].steps] == [step.lr for step in traces[1].steps]


@pytest.mark.parametrize("cell", _marked([cell for cell in CELLS if cell[0]]), ids=lambda cell: name_of(*cell))
def test_deepspeed_collects_the_fp32_weights_that_the_engine_had(of_cell, cell):
    result = of_cell[0]["from zero"]
    if cell[:2] == (1, "bf16-fp32"):
        assert "is not a zero checkpoint" in result, "DeepSpeed knows BF16_Optimizer now: expect True here"
    else:
        assert result is True


@pytest.mark.parametrize("cell", CONVERTED, ids=lambda cell: name_of(*cell))
def test_to_a_universal_checkpoint(two_ranks, cell):
    assert two_ranks.of(continued)[name_of(*cell)]["converted"] == "nothing was raised"


# On other numbers of ranks.


@on_one_rank.after(saved=continued)
@on_four_ranks.after(saved=continued)
def universal(folder, saved):
    """Go on from the universal checkpoints that `continued` left in `saved`, and trace it."""
    results = {}
    for cell in CONVERTED:
        scenario = scenario_of(cell, dist.get_world_size())
        run = Run(scenario, {**scenario.config, "checkpoint": {"load_universal": True}})
        run.engine.load_checkpoint(f"{saved}/{name_of(*cell)}")
        results[name_of(*cell)] = stands(run.engine)
        with Recorder(Path(folder), scenario, "ds_parity") as recorder:
            run.windows(AFTER, recorder)
        run.engine.destroy()
    return results


@on_one_rank.after(saved=continued)
@on_four_ranks.after(saved=continued)
def other_size(folder, saved):
    """Load what two ranks saved as it is: ZeRO 0 goes on, the other stages say on every rank what to do."""
    results = {}
    for stage in STAGES:
        cell = (stage, "fp32", {})
        run = Run(scenario_of(cell, dist.get_world_size()))
        results[stage] = from_all(
            ends_in(lambda run=run, cell=cell: run.engine.load_checkpoint(f"{saved}/{name_of(*cell)}"))
        )
        if stage == 0:
            results["stands"] = stands(run.engine)
            with Recorder(Path(folder), run.scenario, "ds_parity") as recorder:
                run.windows(AFTER, recorder)
        run.engine.destroy()
    return results


class TestOnOneAndFourRanks:
    """What two ranks saved goes on elsewhere, at the same boundaries and LR exactly, but for rounding in the rest."""

    def assert_goes_on(self, two_ranks, launched, cell, task):
        folders = two_ranks.folder_of(continued) / "traces", launched.folder_of(task)
        reference, candidate = (read_trace(folder / name_of(*cell) / "ds_parity.jsonl") for folder in folders)
        comparison = compare(reference, candidate, Tier.REASSOCIATED, scenario_of(cell).dtype)
        assert comparison.equal, verdict(comparison)
        assert [step.step for step in candidate.steps] == [3, 4]
        assert [step.lr for step in candidate.steps] == [step.lr for step in reference.steps]
        assert [step.passes for step in candidate.steps] == [step.passes for step in reference.steps]
        assert [step.rollouts for step in candidate.steps] == [step.rollouts for step in reference.steps]

    @pytest.mark.parametrize("cell", CONVERTED, ids=lambda cell: name_of(*cell))
    def test_a_universal_checkpoint_goes_on(self, two_ranks, other_ranks, cell):
        _, launched = other_ranks
        assert launched.of(universal)[name_of(*cell)] == two_ranks.of(continued)[name_of(*cell)]["saved"]
        self.assert_goes_on(two_ranks, launched, cell, universal)

    def test_a_checkpoint_of_zero_0_goes_on_as_it_is(self, two_ranks, other_ranks):
        ranks, launched = other_ranks
        result = launched.of(other_size)
        assert result["0"] == ["nothing was raised"] * ranks
        assert result["stands"] == two_ranks.of(continued)["0-fp32"]["saved"]
        self.assert_goes_on(two_ranks, launched, (0, "fp32", {}), other_size)

    @pytest.mark.parametrize("stage", ["1", "2", "3"])
    def test_other_stages_say_on_every_rank_what_to_do(self, other_ranks, stage):
        ranks, launched = other_ranks
        messages = launched.of(other_size)[stage]
        assert len(messages) == ranks
        for message in messages:
            assert message.startswith("CheckpointError: load_checkpoint(")
            assert "ds_to_universal" in message
            assert '"load_universal": true' in message
        assert "DP world size of 2" in messages[0]
