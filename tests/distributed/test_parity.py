"""The engine under test against its references, on real ranks.

Each block names its scenarios, registers their runs, and compares the traces that they leave.
"""

from itertools import product
from pathlib import Path

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.report.terminal import verdict
from ds_parity.parity.running.scenario import Scenario
from tests.distributed import cells
from tests.distributed.asserting import assert_equal
from tests.distributed.cells import DTYPES, STAGES, TINY, config
from tests.distributed.sets import at_length_on_two_ranks, on_four_ranks, on_one_rank, on_two_ranks

pytestmark = pytest.mark.ranks

ALL = ("deepspeed-loop", "torch", "ds_parity")
TIERS = [("deepspeed-loop", Tier.EXACT), ("torch", Tier.REASSOCIATED)]


UNIFORM = [*[(gas, "SGD") for gas in (2, 3, 4, 5, 6)], (3, "AdamW")]
# In bf16 fewer: a number of passes or a weight goes wrong in any type or in none.
UNIFORM_CELLS = [
    *[(stage, "fp32", *how) for stage, how in product(STAGES, UNIFORM)],
    *[(stage, "bf16", *how) for stage, how in product(STAGES, [(3, "SGD"), (4, "SGD"), (3, "AdamW")])],
]
for cell in UNIFORM_CELLS:
    on_two_ranks.train(cells.uniform(*cell), "deepspeed", "ds_parity")


@pytest.mark.parametrize(("stage", "dtype", "gas", "optimizer"), UNIFORM_CELLS)
def test_uniform_windows_are_bit_identical_to_fixed_accumulation(two_ranks, stage, dtype, gas, optimizer):
    """Loss, LR, gradient norm, weights and counters, for a number of passes that is a power of two and not."""
    assert_equal(two_ranks, cells.uniform(stage, dtype, gas, optimizer), "deepspeed", Tier.EXACT)


for cell in cells.RAGGED_CELLS:
    on_two_ranks.train(cells.ragged(*cell), *ALL)


@pytest.mark.parametrize(("stage", "dtype", "weight"), cells.RAGGED_CELLS)
class TestRaggedWindows:
    """Overshooting windows of 1 to 9 passes, 0 to 5 rollouts a micro-batch, idle ranks, a last window left open."""

    def test_are_bit_identical_to_the_engine_driven_by_hand(self, two_ranks, stage, dtype, weight):
        assert_equal(two_ranks, cells.ragged(stage, dtype, weight), "deepspeed-loop", Tier.EXACT)

    def test_are_the_whole_window_in_one_batch_but_for_rounding(self, two_ranks, stage, dtype, weight):
        assert_equal(two_ranks, cells.ragged(stage, dtype, weight), "torch", Tier.REASSOCIATED)


def test_the_ragged_scenarios_hold_what_they_are_there_for(two_ranks):
    """A comparison on windows that never overshoot, idle or end early would prove nothing."""
    for stage, weight in product(STAGES, cells.WEIGHTS):
        steps = two_ranks.trace(cells.ragged(stage, "fp32", weight), "ds_parity").steps
        assert any(step.idle_passes for step in steps)
        assert any(step.rollouts > 12 for step in steps)
        assert steps[-1].rollouts < 12
        assert len({step.passes for step in steps}) > 1


WRONG = [*product(STAGES, ("rollout", "token"))]
for stage, weight in WRONG:
    on_two_ranks.train(cells.ragged(stage, "fp32", weight), "mean-of-micro-batches")


@pytest.mark.parametrize("weight", ["rollout", "token"])
@pytest.mark.parametrize("stage", STAGES)
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


def streams(stage, dtype):
    """Ranks that run out of data at different times, counts known ahead, a schedule that stands at nominal progress."""
    section = {"loss_weight": "token", "lookahead": 5, "lr_progress": "rollout"}
    extended = config(stage, dtype, **section)
    return Scenario(f"streams-{stage}-{dtype}", extended, shape="overshoot", drive="passes", windows=4, seed=4, **TINY)


for stage, dtype in product(STAGES, DTYPES):
    on_two_ranks.train(streams(stage, dtype), *ALL)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_streams_with_look_ahead_step_alike(two_ranks, stage, dtype, reference, tier):
    """Ranks that run out of data at different times, totals known ahead, a scheduler at nominal progress."""
    assert_equal(two_ranks, streams(stage, dtype), reference, tier)


def dry(stage, ranks):
    """Ranks run out of data at different times, nothing known ahead: a rank that waits for a pass is in no forward."""
    extended = config(stage, loss_weight="token")
    return Scenario(
        f"dry-{stage}-{ranks}", extended, ranks, shape="overshoot", drive="passes", windows=4, seed=4, **TINY
    )


for stage in STAGES:
    on_two_ranks.train(dry(stage, 2), "deepspeed-loop", "ds_parity")
    on_four_ranks.train(dry(stage, 4), "deepspeed-loop", "ds_parity")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_streams_without_look_ahead_step_alike_and_come_to_an_end(two_ranks, four_ranks, stage, ranks):
    """Seen to hang on ZeRO 3, whose forward waits for all, while a rank without data waited to hear of the pass."""
    launched, scenario = {2: two_ranks, 4: four_ranks}[ranks], dry(stage, ranks)
    assert_equal(launched, scenario, "deepspeed-loop", Tier.EXACT)
    assert any(step.idle_passes for step in launched.trace(scenario, "ds_parity").steps)


READY = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))


def ready(path):
    """A ready configuration in windows that hold exactly the target, which all of them can take."""
    extended = cells.filled_in(path)
    drive = "passes" if extended.get("ds_parity", {}).get("lookahead") else "loop"
    return Scenario(f"ready-{path.stem}", extended, shape="ragged", drive=drive, windows=3, seed=7, **TINY)


for path in READY:
    on_two_ranks.train(ready(path), *ALL)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_every_ready_configuration_steps_right(two_ranks, path, reference, tier):
    """What people start from, "auto" filled in as the Hugging Face Trainer does."""
    assert_equal(two_ranks, ready(path), reference, tier)


REAL_LENGTHS = {"model": "ds_parity.parity.data.model:build_tiny", "max_tokens": 300, "windows": 4, "seed": 5}


def unplanned(stage, target):
    """What `planned` is compared with: the same rollouts, ragged."""
    extended = config(stage, passes=target, loss_weight="token")
    return Scenario(f"unplanned-{stage}-{target}", extended, shape="ragged", **REAL_LENGTHS)


def planned(stage, collation="packed", *, drive="passes", turns=False, target=12, **section):
    """Windows of real lengths, packed or padded, by turns or whole, with look-ahead or without."""
    name = f"planned-{stage}-{collation}-{drive}-{'turns' if turns else 'whole'}-{target}"
    extended = config(stage, passes=target, loss_weight="token", **section)
    how = {"drive": drive, "collation": collation, "turns": turns}
    return Scenario(
        name, extended, shape="planned", micro_batch_tokens=270 if target == 3 else 540, **how, **REAL_LENGTHS
    )


# A window of 3 leaves a rank idle, now and then in a pass that is not its last.
PLANNED = [
    *[planned(stage, target=3) for stage in STAGES],
    *[planned(stage, turns=True, lookahead=12) for stage in (1, 3)],
    planned(1, "padded", drive="loop"),
    planned(3, "padded", turns=True),
]
for scenario in PLANNED:
    target = scenario.settings.target
    at_length_on_two_ranks.train(scenario, *ALL)
    at_length_on_two_ranks.train(unplanned(scenario.config["zero_optimization"]["stage"], target), "ds_parity")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", PLANNED, ids=lambda scenario: scenario.name)
class TestPlannedWindows:
    """Packed or padded, whole rollouts or a sequence a turn, idle passes where the plan has them."""

    def test_are_bit_identical_to_the_engine_driven_by_hand(self, two_ranks_at_length, scenario):
        assert_equal(two_ranks_at_length, scenario, "deepspeed-loop", Tier.EXACT)

    def test_are_the_whole_window_in_one_padded_batch_but_for_rounding(self, two_ranks_at_length, scenario):
        """Which knows nothing of packing: a token that saw its neighbour's would show."""
        assert_equal(two_ranks_at_length, scenario, "torch", Tier.REASSOCIATED)

    def test_step_as_the_same_rollouts_do_unplanned(self, two_ranks_at_length, scenario):
        """Ragged micro-batches of the same windows; also by turns, whose losses add up to the whole rollouts'."""
        target = scenario.settings.target
        reference = unplanned(scenario.config["zero_optimization"]["stage"], target)
        comparison = compare(
            two_ranks_at_length.trace(reference, "ds_parity"),
            two_ranks_at_length.trace(scenario, "ds_parity"),
            Tier.REASSOCIATED,
        )
        unlike = {difference.field for difference in comparison.differences}
        # A turn tells its rollout's reward once more.
        told_anew = {"metrics.reward"} if scenario.turns else set()
        assert unlike <= {"passes", "idle_passes"} | told_anew, verdict(comparison)
        assert [row.candidate.rollouts for row in comparison.rows] == [target] * 4


def summed(stage):
    """A loss that is a sum over its tokens, corrected at the boundary."""
    extended = config(stage, loss_weight="token", loss_reduction="sum")
    return Scenario(f"summed-{stage}", extended, shape="overshoot", windows=3, seed=6, **TINY)


for stage in STAGES:
    on_two_ranks.train(summed(stage), *ALL)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_summed_loss_steps_alike(two_ranks, stage, reference, tier):
    assert_equal(two_ranks, summed(stage), reference, tier)


def same_windows(stage, dtype, ranks):
    """The same windows on any number of ranks."""
    extended = config(stage, dtype, loss_weight="token")
    return Scenario(f"same-{stage}-{dtype}", extended, ranks, shape="ragged", windows=4, seed=5, **TINY)


SAME_WINDOWS = [*product(STAGES, ("fp32",)), (2, "bf16")]
for rank_set, cell in product((on_one_rank, on_two_ranks, on_four_ranks), SAME_WINDOWS):
    rank_set.train(same_windows(*cell, rank_set.ranks), "ds_parity")


@pytest.mark.parametrize(("stage", "dtype"), SAME_WINDOWS)
def test_the_same_rollouts_step_alike_on_1_2_and_4_ranks(two_ranks, other_ranks, stage, dtype):
    """The same boundaries and LR exactly, the same losses and weights but for rounding."""
    ranks, launched = other_ranks
    reference = two_ranks.trace(same_windows(stage, dtype, 2), "ds_parity")
    candidate = launched.trace(same_windows(stage, dtype, ranks), "ds_parity")
    comparison = compare(reference, candidate, Tier.REASSOCIATED, dtype)
    assert comparison.equal, verdict(comparison)
    assert [step.lr for step in candidate.steps] == [step.lr for step in reference.steps]
    assert [step.rollouts for step in candidate.steps] == [12] * 4
