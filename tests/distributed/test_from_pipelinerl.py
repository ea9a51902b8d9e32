"""PipelineRL's loop and what is left of it with ds_parity: both make the same steps."""

import re

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from ds_parity.trace import read_trace
from tests.distributed.ranked_pipelinerl import CLIPPING, PASSES

pytestmark = pytest.mark.ranks
SAID = r"(?m)^(?:before|after|as found): (\d+) passes, (\d+) idle on a rank, weights (\w{12})$"


class Runs:
    def __init__(self, two_ranks):
        self._folder = two_ranks.folder / "from_pipelinerl"
        self._said = two_ranks.results["from_pipelinerl"]

    def said(self, name):
        """Passes, idle passes and weights, as the command line printed them."""
        code, text = self._said[name]
        assert code == 0
        passes, idle, weights = re.search(SAID, text).groups()
        return int(passes), int(idle), weights

    def trace(self, name):
        return read_trace(self._folder / f"{name}.jsonl")

    def compared(self, reference, candidate, tier=Tier.REASSOCIATED):
        return compare(self.trace(reference), self.trace(candidate), tier)

    def norms(self, name):
        return [step.grad_norm for step in self.trace(name).steps]

    def losses(self, name):
        return [step.loss for step in self.trace(name).steps]


@pytest.fixture
def runs(two_ranks):
    return Runs(two_ranks)


class TestInItsPlace:
    def test_the_same_micro_batches_make_the_same_steps_bit_for_bit(self, runs):
        comparison = runs.compared("before", "quotas", Tier.EXACT)
        assert comparison.equal
        assert {"loss", "grad_norm", "lr", "rollouts", "tokens", "metrics"}.isdisjoint(comparison.not_compared)
        assert runs.said("quotas") == runs.said("before")
        assert len(comparison.rows) == 3

    def test_a_sentinel_is_an_idle_pass(self, runs):
        assert runs.said("before")[1] == sum(step.idle_passes for step in runs.trace("quotas").steps) > 0

    def test_a_plan_makes_the_same_steps_in_fewer_passes_and_none_idle(self, runs):
        assert runs.compared("before", "after").equal
        assert runs.said("after")[0] < runs.said("before")[0]
        assert runs.said("after")[1] == 0

    def test_where_the_target_is_no_power_of_two_the_reported_loss_alone_is_rounded_otherwise(self, runs):
        """The gradient's one factor, ranks / target, is rounded once in both; their loss is times the rounded 1 / target."""
        assert runs.said("quotas, 6") == runs.said("before, 6")
        assert runs.norms("quotas, 6") == runs.norms("before, 6")
        assert runs.compared("before, 6", "quotas, 6").equal
        assert runs.losses("quotas, 6") != runs.losses("before, 6")


class TestAsFound:
    def test_the_gradient_is_divided_by_the_passes_once_more(self, runs):
        """Exactly at first; then weights part, because other steps are clipped (measured: norms by 2.4e-4)."""
        found, right = runs.norms("found"), runs.norms("before")
        assert found[0] * PASSES == right[0]
        assert [norm * PASSES for norm in found] == pytest.approx(right, rel=1e-3)
        reference, candidate = runs.trace("before"), runs.trace("found")
        cause = diagnose(reference, candidate, compare(reference, candidate, Tier.REASSOCIATED))[0]
        assert cause.evidence == f"the gradient norm is {1 / PASSES} times the reference's in all 3 steps"

    def test_so_the_clipping_threshold_is_another_and_so_are_the_weights(self, runs):
        clipped = [norm > CLIPPING for norm in runs.norms("found")]
        assert all(norm > CLIPPING for norm in runs.norms("before"))
        assert not all(clipped)
        assert any(clipped)
        assert runs.compared("before", "found").measured[0].difference > 1e-4, "losses, which the weights decide"

    def test_a_run_that_was_tuned_so_goes_on_with_clipping_and_eps_times_the_passes(self, runs):
        comparison = runs.compared("found", "tuned")
        fields = {difference.field for difference in comparison.differences}
        assert fields == {"tokens", "grad_norm", "grad_norm, mean"}

    def test_tokens_are_those_of_the_first_rank_times_the_ranks(self, runs):
        found, right = ([step.tokens for step in runs.trace(name).steps] for name in ("found", "before"))
        assert all(a != b for a, b in zip(found, right, strict=True))
        assert right == [step.tokens for step in runs.trace("after").steps]


def test_quotas_that_cannot_be_equal_are_refused_in_one_message(two_ranks):
    code, said = two_ranks.results["from_pipelinerl"]["uneven"]
    assert code == 2
    assert said == "before.py: gradient_accumulation_passes = 7: quotas must be equal, so 2 ranks must divide it\n"
