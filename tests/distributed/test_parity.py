"""The engine under test against its references, on two real ranks."""

from itertools import product

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.report.terminal import verdict
from tests.distributed import cells

pytestmark = pytest.mark.ranks


def assert_equal(launched, scenario, reference, tier):
    traces = [launched.trace(scenario, engine) for engine in (reference, "ds_parity")]
    comparison = compare(*traces, tier, scenario.dtype)
    assert comparison.equal, verdict(comparison)
    assert len(comparison.rows) >= 3
    assert all(row.candidate.weights is not None for row in comparison.rows)


@pytest.mark.parametrize(("stage", "dtype", "gas", "optimizer"), cells.UNIFORM_CELLS)
def test_uniform_windows_are_bit_identical_to_fixed_accumulation(two_ranks, stage, dtype, gas, optimizer):
    """Loss, LR, gradient norm, weights and counters, for a number of passes that is a power of two and not."""
    assert_equal(two_ranks, cells.uniform(stage, dtype, gas, optimizer), "deepspeed", Tier.EXACT)


@pytest.mark.parametrize(("stage", "dtype", "weight"), cells.RAGGED_CELLS)
class TestRaggedWindows:
    """Overshooting windows of 1 to 9 passes, 0 to 5 rollouts a micro-batch, ranks that idle, a last window left open."""

    def test_are_bit_identical_to_the_engine_driven_by_hand(self, two_ranks, stage, dtype, weight):
        assert_equal(two_ranks, cells.ragged(stage, dtype, weight), "deepspeed-loop", Tier.EXACT)

    def test_are_the_whole_window_in_one_batch_but_for_rounding(self, two_ranks, stage, dtype, weight):
        assert_equal(two_ranks, cells.ragged(stage, dtype, weight), "torch", Tier.REASSOCIATED)


@pytest.mark.parametrize(("reference", "tier"), [("deepspeed-loop", Tier.EXACT), ("torch", Tier.REASSOCIATED)])
@pytest.mark.parametrize("dtype", cells.DTYPES)
@pytest.mark.parametrize("stage", cells.STAGES)
def test_streams_with_look_ahead_step_alike(two_ranks, stage, dtype, reference, tier):
    """Streams that run dry at different times, totals known ahead, a scheduler at nominal progress."""
    assert_equal(two_ranks, cells.streams(stage, dtype), reference, tier)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", cells.STAGES)
def test_streams_without_look_ahead_step_alike_and_come_to_an_end(two_ranks, four_ranks, stage, ranks):
    """Seen to hang on ZeRO 3, whose forward waits for all, while a rank without data waited to hear of the pass."""
    launched, scenario = {2: two_ranks, 4: four_ranks}[ranks], cells.dry(stage, ranks)
    assert_equal(launched, scenario, "deepspeed-loop", Tier.EXACT)
    assert any(step.idle_passes for step in launched.trace(scenario, "ds_parity").steps)


@pytest.mark.parametrize(("reference", "tier"), [("deepspeed-loop", Tier.EXACT), ("torch", Tier.REASSOCIATED)])
@pytest.mark.parametrize("path", cells.READY, ids=lambda path: path.stem)
def test_every_ready_configuration_steps_right(two_ranks, path, reference, tier):
    """What people start from, "auto" filled in as the Hugging Face Trainer does."""
    assert_equal(two_ranks, cells.ready(path), reference, tier)


@pytest.mark.parametrize("scenario", cells.PLANNED, ids=lambda scenario: scenario.name)
class TestPlannedWindows:
    """Packed or padded, whole rollouts or a sequence a turn, idle passes where the plan has them."""

    def test_are_bit_identical_to_the_engine_driven_by_hand(self, two_ranks, scenario):
        assert_equal(two_ranks, scenario, "deepspeed-loop", Tier.EXACT)

    def test_are_the_whole_window_in_one_padded_batch_but_for_rounding(self, two_ranks, scenario):
        """Which knows nothing of packing: a token that saw its neighbour's would show."""
        assert_equal(two_ranks, scenario, "torch", Tier.REASSOCIATED)

    def test_step_as_the_same_rollouts_do_unplanned(self, two_ranks, scenario):
        """Ragged micro-batches of the same windows; step-wise too, whose turns' losses add up to the whole rollouts'."""
        target = scenario.settings.target
        unplanned = cells.unplanned(scenario.config["zero_optimization"]["stage"], target)
        comparison = compare(
            two_ranks.trace(unplanned, "ds_parity"), two_ranks.trace(scenario, "ds_parity"), Tier.REASSOCIATED
        )
        unlike = {difference.field for difference in comparison.differences}
        # A turn tells its rollout's reward once more.
        told_anew = {"metrics.reward"} if scenario.turns else set()
        assert unlike <= {"passes", "idle_passes"} | told_anew, verdict(comparison)
        assert [row.candidate.rollouts for row in comparison.rows] == [target] * 4


@pytest.mark.parametrize(("reference", "tier"), [("deepspeed-loop", Tier.EXACT), ("torch", Tier.REASSOCIATED)])
@pytest.mark.parametrize("stage", cells.STAGES)
def test_a_summed_loss_steps_alike(two_ranks, stage, reference, tier):
    assert_equal(two_ranks, cells.summed(stage), reference, tier)


def test_the_ragged_scenarios_hold_what_they_are_there_for(two_ranks):
    """A comparison on windows that never overshoot, idle or end early would prove nothing."""
    for stage, weight in product(cells.STAGES, cells.WEIGHTS):
        steps = two_ranks.trace(cells.ragged(stage, "fp32", weight), "ds_parity").steps
        assert any(step.idle_passes for step in steps)
        assert any(step.rollouts > 12 for step in steps)
        assert steps[-1].rollouts < 12
        assert len({step.passes for step in steps}) > 1


@pytest.mark.parametrize("weight", ["rollout", "token"])
@pytest.mark.parametrize("stage", cells.STAGES)
def test_the_mean_of_micro_batches_fails_and_by_far(two_ranks, stage, weight):
    """The negative control: in its first step the gradient norm lies 1,000 bounds off, or more."""
    scenario = cells.ragged(stage, "fp32", weight)
    comparison = compare(
        two_ranks.trace(scenario, "torch"), two_ranks.trace(scenario, "mean-of-micro-batches"), Tier.REASSOCIATED
    )
    assert not comparison.equal
    off = {d.field: d for d in comparison.differences if d.step == 1}
    assert off["grad_norm"].difference > 1000 * off["grad_norm"].bound
    assert "loss" not in off, "what is reported is right, and only the gradient is not"


@pytest.mark.parametrize(("stage", "dtype"), cells.SAME_WINDOWS)
def test_the_same_rollouts_step_alike_on_1_2_and_4_ranks(two_ranks, other_ranks, stage, dtype):
    """The same boundaries and LR exactly, the same losses and weights but for rounding."""
    ranks, launched = other_ranks
    reference = two_ranks.trace(cells.same_windows(stage, dtype, 2), "ds_parity")
    candidate = launched.trace(cells.same_windows(stage, dtype, ranks), "ds_parity")
    comparison = compare(reference, candidate, Tier.REASSOCIATED, dtype)
    assert comparison.equal, verdict(comparison)
    assert [step.lr for step in candidate.steps] == [step.lr for step in reference.steps]
    assert [step.rollouts for step in candidate.steps] == [12] * 4
