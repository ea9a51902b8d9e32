"""Sequence-parallel groups of 2 out of 4 ranks against the references: a micro-batch counts once."""

from itertools import product

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.probe.decomposition import TOLERANCE
from ds_parity.parity.running.scenario import Scenario
from tests.distributed.asserting import assert_equal
from tests.distributed.cells import DTYPES, STAGES, config
from tests.distributed.sequence import FP32_ACCUMULATION, SHARED, ragged
from tests.distributed.sets import at_length_on_four_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def streams(stage):
    """Ranks that run out of data at different times, counts known ahead, clipped gradients."""
    section = {"loss_weight": "token", "lookahead": 5, "lr_progress": "rollout"}
    extended = {**config(stage, **section), "gradient_clipping": 0.1}  # below the norm of every step
    name = f"sequence-streams-{stage}"
    return Scenario(name, extended, shape="overshoot", drive="passes", windows=3, seed=4, **SHARED)


def summed(stage):
    extended = config(stage, loss_weight="token", loss_reduction="sum")
    return Scenario(f"sequence-summed-{stage}", extended, shape="overshoot", windows=3, seed=6, **SHARED)


def uniform(stage):
    return Scenario(f"sequence-uniform-{stage}", config(stage, passes=6), shape="uniform", windows=3, **SHARED)


def probed(stage, name="fp32", **keys):
    extended = {**config(stage, loss_weight="token"), **keys}
    return Scenario(f"sequence-probe-{stage}-{name}", extended, shape="overshoot", windows=2, seed=3, **SHARED)


PROBES = [
    *[probed(stage) for stage in STAGES],
    probed(2, "accumulated", **FP32_ACCUMULATION),
    probed(2, "summed-gradients", gradient_allreduce_op="sum"),
    probed(1, "no-reduce-scatter", zero_optimization={"stage": 1, "reduce_scatter": False}),
]

ENGINES = ("deepspeed-loop", "torch", "ds_parity")
TIERS = [("deepspeed-loop", Tier.EXACT), ("torch", Tier.REASSOCIATED)]
STREAMED, SUMMED = (0, 2, 3), (1, 3)

for cell in product(STAGES, DTYPES):
    at_length_on_four_ranks.train(ragged(*cell), *ENGINES)
for scenario in (*map(streams, STREAMED), *map(summed, SUMMED)):
    at_length_on_four_ranks.train(scenario, *ENGINES)
for stage in (2, 3):
    at_length_on_four_ranks.train(uniform(stage), "deepspeed", "ds_parity")
for scenario in PROBES:
    at_length_on_four_ranks.probe(scenario)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_ragged_windows_step_as_the_unsliced_model_does(four_ranks_at_length, stage, dtype, reference, tier):
    """Token weights, idle micro-batches, corrected boundaries, a last window left open."""
    assert_equal(four_ranks_at_length, ragged(stage, dtype), reference, tier)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("stage", STREAMED)
def test_streams_with_look_ahead_step_alike(four_ranks_at_length, stage, reference, tier):
    assert_equal(four_ranks_at_length, streams(stage), reference, tier)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("stage", SUMMED)
def test_a_summed_loss_steps_alike(four_ranks_at_length, stage, reference, tier):
    assert_equal(four_ranks_at_length, summed(stage), reference, tier)


def test_the_scenarios_hold_what_they_are_there_for(four_ranks_at_length):
    steps = four_ranks_at_length.trace(ragged(2, "fp32"), "ds_parity").steps
    assert any(step.idle_passes for step in steps)
    assert steps[-1].rollouts < 12
    assert all(step.total == step.tokens for step in steps)
    steps = four_ranks_at_length.trace(streams(2), "ds_parity").steps
    assert any(step.idle_passes for step in steps)
    assert any(step.rollouts != 12 for step in steps)


@pytest.mark.parametrize("scenario", PROBES, ids=lambda scenario: scenario.name)
def test_every_micro_batch_enters_once_with_its_weight_over_the_total(four_ranks_at_length, scenario):
    result = four_ranks_at_length.probed(scenario)
    assert result.within(TOLERANCE[scenario.dtype]), result
    assert len(result.measured[0]) == 2, "a column for each data-parallel rank"


def test_uniform_windows_on_zero_3_are_bit_identical_to_bare_deepspeed(four_ranks_at_length):
    assert_equal(four_ranks_at_length, uniform(3), "deepspeed", Tier.EXACT)


def test_on_zero_2_bare_deepspeed_steps_by_twice_the_gradient_of_a_gathered_loss(four_ranks_at_length):
    """Why ds_parity differs from it there: DeepSpeed takes slices' gradients to add up to the loss's own."""
    traces = [four_ranks_at_length.trace(uniform(2), engine) for engine in ("deepspeed", "ds_parity")]
    bare, candidate = (trace.steps[0] for trace in traces)
    assert bare.loss == candidate.loss
    assert bare.grad_norm == pytest.approx(2 * candidate.grad_norm, rel=1e-6)
