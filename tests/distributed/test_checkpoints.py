"""What ranks did with checkpoints in ranked_checkpoints.py, held against what was promised."""

import re

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.report.terminal import verdict
from ds_parity.trace import read_trace
from tests.distributed import cells
from tests.distributed import ranked_checkpoints as ranked
from tests.distributed.ranked_checkpoints import name_of, scenario_of

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[str(stage) for stage in cells.STAGES])
def stage(request):
    return request.param


@pytest.mark.parametrize("cell", ranked.CELLS, ids=lambda cell: name_of(*cell))
class TestARunThatIsContinued:
    def test_is_saved_with_a_surplus_pending_and_fractional_progress(self, two_ranks, cell):
        saved = two_ranks.results["continued"][name_of(*cell)]["saved"]
        assert saved["window"] == [2, 9]
        assert saved["progress"] == 27 / 12
        assert saved["clocks"][:2] == [2, 27]
        assert [decay for _, decay in saved["groups"]] == [0.1, 0.0]

    def test_stands_where_it_was_saved_in_a_fresh_engine_and_in_one_inside_a_window(self, two_ranks, cell):
        found = two_ranks.results["continued"][name_of(*cell)]
        assert found["loaded"] == [found["saved"]] * 2
        assert found["open"] == 1, "no window was open where it was loaded"

    def test_goes_on_bit_for_bit(self, two_ranks, cell):
        """Boundaries, loss, LR, gradient norm, weights, the schedule's state and every counter.

        DeepSpeedCPUAdam computes beta ** steps by one power after loading, and by a running product before: both runs
        that were continued are alike bit for bit, and off the one that was not by rounding.
        """
        as_the_run, as_each_other = two_ranks.results["continued"][name_of(*cell)]["alike"]
        assert as_each_other
        assert as_the_run or ranked.cpu_adam(cell)
        if not as_the_run:
            folder = two_ranks.folder / "continued" / "traces" / name_of(*cell)
            traces = [read_trace(folder / f"{state}.jsonl") for state in ("ds_parity", "fresh")]
            comparison = compare(*traces, Tier.REASSOCIATED, scenario_of(cell).dtype)
            assert comparison.equal, verdict(comparison)
            assert [step.lr for step in traces[0].steps] == [step.lr for step in traces[1].steps]


@pytest.mark.parametrize("cell", [cell for cell in ranked.CELLS if cell[0]], ids=lambda cell: name_of(*cell))
def test_deepspeed_collects_the_fp32_weights_that_the_engine_had(two_ranks, cell):
    found = two_ranks.results["continued"][name_of(*cell)]["from zero"]
    if cell[:2] == (1, "bf16-fp32"):
        assert "is not a zero checkpoint" in found, "DeepSpeed knows BF16_Optimizer now: expect True here"
    else:
        assert found is True


@pytest.mark.parametrize("scheduler", ranked.SCHEDULERS)
def test_a_run_goes_on_bit_for_bit_under_other_schedulers(two_ranks, scheduler):
    found = two_ranks.results["schedulers"]
    by_rollout = found[f"{scheduler}, rollout"]
    assert by_rollout["alike"] == [True, True]
    assert len(set(by_rollout["rates"])) == len(by_rollout["rates"]) > 1, "a schedule that stands still proves nothing"
    by_step = found.get(f"{scheduler}, optimizer_step")
    if by_step is not None:
        assert by_step["alike"] == [True, True]
        assert by_step["rates"] != by_rollout["rates"]


class TestInsideAWindow:
    def test_saving_is_refused_with_what_is_pending(self, two_ranks, stage):
        """Four rollouts of the window's eight were carried over from the last one."""
        pending, owed = two_ranks.results["into_windows"][stage]["refused"]
        assert re.match(r"CheckpointError: save_checkpoint\(\) inside window 1: 2 rollouts of 1 passes", pending)
        assert "(at 4 rollouts), or call finish() first" in pending
        assert "8 rollouts of 2 passes are pending" in owed

    def test_loading_throws_the_open_window_away(self, two_ranks, stage):
        found = two_ranks.results["into_windows"][stage]
        assert found["dirty"] == found["clean"]
        assert [step["step"] for step, *_ in found["clean"]] == [3, 4]

    def test_it_stays_where_there_is_nothing_to_load(self, two_ranks, stage):
        found = two_ranks.results["into_windows"][stage]
        assert found["nothing"] == [None, None]
        assert found["nowhere"] == [1, 1]


class TestLoading:
    def test_weights_alone_leaves_the_counts(self, two_ranks, stage):
        assert two_ranks.results["into_windows"][stage]["weights alone"] == [0, 0]

    def test_towards_another_target_is_refused(self, two_ranks, stage):
        message = two_ranks.results["into_windows"][stage]["other target"]
        assert "target of 8 rollouts, this configuration says 6 rollouts" in message

    def test_under_another_lr_progress_is_refused_unless_the_schedule_stays_as_it_is(self, two_ranks, stage):
        found = two_ranks.results["into_windows"][stage]
        assert "lr_progress was 'rollout', this configuration says 'optimizer_step'" in found["other progress"]
        assert "load_lr_scheduler_states=False" in found["other progress"]
        assert found["own progress"] == 1.5

    def test_what_was_loaded_can_be_saved_again(self, two_ranks, stage):
        assert two_ranks.results["into_windows"][stage]["again"] == [1, True]


class TestBareDeepSpeed:
    def test_a_checkpoint_of_it_goes_on_in_ours_where_its_schedule_stood(self, two_ranks, stage):
        """Five steps of four rollouts on the bare engine, then one of ours, then one of six."""
        found = two_ranks.results["bare"][stage]
        assert found["loaded"]
        assert found["rates"][:4] == pytest.approx([0.025 + 0.0025 * at for at in (4, 4, 5, 6.5)])
        assert found["step"] == [6, 4, 30]
        assert found["as bare"]
        assert found["said"].count("the window starts fresh") == 1

    def test_ours_goes_on_in_it(self, two_ranks, stage):
        """At a fractional place of the schedule, a step further with every step."""
        found = two_ranks.results["bare"][stage]
        assert found["rates"][4:] == pytest.approx([0.025 + 0.0025 * at for at in (6.5, 7.5)])
        assert found["back"] == [True, True, 8]


class TestConversion:
    def test_by_command_and_the_script_beside_the_checkpoint(self, two_ranks):
        found = two_ranks.results["by_command"]
        assert found["said"] == [[0, ""], [0, ""]]
        assert found["script"]
        assert found["stands"]
        assert found["same"]
        assert "universal" in found["path"]

    @pytest.mark.parametrize("cell", ranked.CONVERTED, ids=lambda cell: name_of(*cell))
    def test_to_a_universal_checkpoint(self, two_ranks, cell):
        assert two_ranks.results["continued"][name_of(*cell)]["converted"] == "nothing was raised"

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("ZeRO 0", "can't find \\*_optim_states.pt"),
            ("SGD", "KeyError: 'exp_avg'"),
            ("SGD 3", "KeyError: 'exp_avg'"),
        ],
    )
    def test_what_deepspeed_does_not_convert(self, two_ranks, name, said):
        assert re.search(said, two_ranks.results["not_converted"][name])


class TestOnOneAndFourRanks:
    """What two ranks saved goes on elsewhere, at the same boundaries and LR exactly, but for rounding in the rest."""

    def assert_goes_on(self, two_ranks, launched, cell, task):
        folders = two_ranks.folder / "continued" / "traces", launched.folder / task
        reference, candidate = (read_trace(folder / name_of(*cell) / "ds_parity.jsonl") for folder in folders)
        comparison = compare(reference, candidate, Tier.REASSOCIATED, scenario_of(cell).dtype)
        assert comparison.equal, verdict(comparison)
        assert [step.step for step in candidate.steps] == [3, 4]
        assert [step.lr for step in candidate.steps] == [step.lr for step in reference.steps]
        assert [step.passes for step in candidate.steps] == [step.passes for step in reference.steps]
        assert [step.rollouts for step in candidate.steps] == [step.rollouts for step in reference.steps]

    @pytest.mark.parametrize("cell", ranked.CONVERTED, ids=lambda cell: name_of(*cell))
    def test_a_universal_checkpoint_goes_on(self, two_ranks, other_ranks, cell):
        _, launched = other_ranks
        assert launched.results["universal"][name_of(*cell)] == two_ranks.results["continued"][name_of(*cell)]["saved"]
        self.assert_goes_on(two_ranks, launched, cell, "universal")

    def test_a_checkpoint_of_zero_0_goes_on_as_it_is(self, two_ranks, other_ranks):
        ranks, launched = other_ranks
        found = launched.results["other_size"]
        assert found["0"] == ["nothing was raised"] * ranks
        assert found["stands"] == two_ranks.results["continued"]["0-fp32"]["saved"]
        self.assert_goes_on(two_ranks, launched, (0, "fp32", {}), "other_size")

    @pytest.mark.parametrize("stage", ["1", "2", "3"])
    def test_other_stages_say_on_every_rank_what_to_do(self, other_ranks, stage):
        ranks, launched = other_ranks
        messages = launched.results["other_size"][stage]
        assert len(messages) == ranks
        for message in messages:
            assert message.startswith("CheckpointError: load_checkpoint(")
            assert "ds_to_universal" in message
            assert '"load_universal": true' in message
        assert "DP world size of 2" in messages[0]
