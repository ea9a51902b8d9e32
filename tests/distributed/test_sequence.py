"""Sequence-parallel groups of 2 out of 4 ranks: a micro-batch counts once, and its slices add up to its gradient."""

from itertools import product

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.probe.decomposition import TOLERANCE, ProbeResult
from tests.distributed import cells, ranked_sequence
from tests.distributed.test_parity import assert_equal

pytestmark = pytest.mark.ranks
TIERS = [("deepspeed-loop", Tier.EXACT), ("torch", Tier.REASSOCIATED)]
SUM = 1.0 + 2.0 + 4.0 + 8.0


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("dtype", cells.DTYPES)
@pytest.mark.parametrize("stage", cells.STAGES)
def test_ragged_windows_step_as_the_unsliced_model_does(four_ranks, stage, dtype, reference, tier):
    """Token weights, idle micro-batches, corrected boundaries, a last window left open."""
    assert_equal(four_ranks, ranked_sequence.ragged(stage, dtype), reference, tier)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_streams_with_look_ahead_step_alike(four_ranks, stage, reference, tier):
    assert_equal(four_ranks, ranked_sequence.streams(stage), reference, tier)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_summed_loss_steps_alike(four_ranks, stage, reference, tier):
    assert_equal(four_ranks, ranked_sequence.summed(stage), reference, tier)


def test_the_scenarios_hold_what_they_are_there_for(four_ranks):
    steps = four_ranks.trace(ranked_sequence.ragged(2, "fp32"), "ds_parity").steps
    assert any(step.idle_passes for step in steps)
    assert steps[-1].rollouts < 12
    assert all(step.total == step.tokens for step in steps)
    streams = four_ranks.trace(ranked_sequence.streams(2), "ds_parity").steps
    assert any(step.idle_passes for step in streams)
    assert any(step.rollouts != 12 for step in streams)


@pytest.mark.parametrize("scenario", ranked_sequence.PROBES, ids=lambda scenario: scenario.name)
def test_every_micro_batch_enters_once_with_its_weight_over_the_total(four_ranks, scenario):
    result = ProbeResult(**four_ranks.results[f"{scenario.name}: {ranked_sequence.PROBED}"])
    assert result.within(TOLERANCE[scenario.dtype]), result
    assert len(result.measured[0]) == 2, "a column for each data-parallel rank"


def test_uniform_windows_on_zero_3_are_bit_identical_to_bare_deepspeed(four_ranks):
    assert_equal(four_ranks, ranked_sequence.uniform(3), "deepspeed", Tier.EXACT)


def test_on_zero_2_bare_deepspeed_steps_by_twice_the_gradient_of_a_gathered_loss(four_ranks):
    """Why ours differs from it there: DeepSpeed takes slices' gradients to add up to the loss's own."""
    traces = [four_ranks.trace(ranked_sequence.uniform(2), engine) for engine in ("deepspeed", "ds_parity")]
    bare, ours = (trace.steps[0] for trace in traces)
    assert bare.loss == ours.loss
    assert bare.grad_norm == pytest.approx(2 * ours.grad_norm, rel=1e-6)


class TestWhatDeepSpeedDoes:
    """engine/internals/normalize.py and engine/internals/groups.py rely on it; each rank's gradient is 2^rank."""

    def test_zero_3_divides_by_all_ranks_and_the_others_by_the_data_parallel_ones(self, four_ranks):
        found = four_ranks.results["divisors"]
        expected = {
            f"{stage}-{dtype}": SUM / (4 if stage == 3 else 2) for stage, dtype in product(range(4), cells.DTYPES)
        }
        expected |= {"1-accumulated": SUM / 2, "2-accumulated": SUM / 2, "2-sum": SUM}
        assert found == {name: [[step, step]] * 4 for name, step in expected.items()}

    @pytest.mark.parametrize(
        ("name", "steps"),
        [
            ("mesh", [[5.0, 5.0], [10.0, 10.0]] * 2),  # (1 + 4) / 1 and (2 + 8) / 1: ranks part
            ("key", [[SUM / 4] * 2] * 4),  # no sequence parallelism at all
            ("megatron", [[2.5, 2.5], [5.0, 5.0]] * 2),
            ("scatter", [[SUM / 2, SUM / 4]] * 4),  # two layers of one model
            ("predivide", [[SUM / 4] * 2] * 4),
        ],
    )
    def test_what_is_refused_goes_wrong_in_bare_deepspeed(self, four_ranks, name, steps):
        assert four_ranks.results["wrong_sums"][name]["bare"] == steps


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "mesh",
            "a sequence-parallel size of 2 from mesh_param, without an mpu that has get_sequence_data_parallel_group",
        ),
        ("key", "sequence_parallel_size = 2, but the sequence-parallel size from no mpu and no mesh_param is 1"),
        ("megatron", "gradients are summed over ranks [0, 2], which leaves out sequence-parallel peers [0, 1]"),
        ("scatter", "zero_optimization.reduce_scatter = false with sequence parallelism on ZeRO stage 3"),
        ("predivide", "gradient_predivide_factor = 4 with sequence parallelism, equal to the number of ranks"),
        ("accumulated", "bf16 with fp32 accumulation on ZeRO stage 1, and an mpu whose get_model_parallel_group"),
        ("remembered", "DeepSpeed took a sequence-parallel size of 2, but 1 was asked for"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_reason(four_ranks, name, says):
    assert four_ranks.results["wrong_sums"][name]["said"].startswith(f"ConfigError: {says}")


class TestCounts:
    """Peers that hold slices of one micro-batch must count it alike."""

    def test_a_rank_that_differs_from_its_peer_ends_in_an_error_on_every_rank(self, four_ranks):
        for said in four_ranks.results["different_counts"]["one"]:
            assert said.startswith(
                "RankDesyncError: sequence-parallel ranks of one group passed different counts: rank 2 "
            )
            assert "tokens=10); rank 3 Counts(rollouts=1, prompts=0, tokens=11)." in said
            assert "rank 0" not in said

    @pytest.mark.parametrize("name", ["cancelling", "by-first", "streams"])
    def test_also_where_the_sum_does_not_show_it(self, four_ranks, name):
        every = four_ranks.results["different_counts"][name]
        assert all("passed different counts" in said for said in every), every

    def test_nothing_was_counted_by_a_refused_pass_and_the_engine_goes_on(self, four_ranks):
        assert four_ranks.results["different_counts"]["goes on"] == [2, 20]


@pytest.mark.parametrize("stage", cells.STAGES)
class TestEveryStage:
    def test_an_own_share_times_the_size_is_a_gathered_loss(self, four_ranks, stage):
        gathered, shared = (four_ranks.results["shares"][f"{stage}-{share}"] for share in (False, True))
        for one, other in zip(gathered, shared, strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-7)

    def test_all_ranks_hold_the_same_weights(self, four_ranks, stage):
        every = four_ranks.results["same_weights"][str(stage)]
        assert len(every[0]) >= 3
        assert all(checksums == every[0] for checksums in every)

    def test_an_idle_micro_batch_contributes_nothing_also_where_its_loss_is_nan(self, four_ranks, stage):
        loss, finite, steps = four_ranks.results["not_finite"][str(stage)]
        assert loss is not None
        assert finite
        assert steps == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_resumes_bit_for_bit(four_ranks, stage):
    assert four_ranks.results["resumed"][str(stage)] == [[True, 3, 12]] * 4
