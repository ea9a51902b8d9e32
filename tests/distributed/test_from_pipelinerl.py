"""PipelineRL's loop and what is left of it with ds_parity: both make the same steps over the same three windows."""

import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import read_trace
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

TOOLS = Path(__file__).parents[2] / "tools" / "from_pipelinerl"

READY = json.loads((TOOLS / "ds_config.json").read_text())

PASSES = 8

SMALL = ["--steps", "3", "--max-tokens", "1200"]

CLIPPING = 10.0  # between the norms of the windows as they are and divided by PASSES, so that it tells them apart

SIX = {"gradient_accumulation_passes": 6}

# Name of a trace: the script, its flags, and what of the configuration is its own.
RUNS = {
    "before": ("before", [], {}),
    "quotas": ("after", ["--quotas"], {}),
    "after": ("after", [], {}),
    "found": ("before", ["--as-found"], {}),
    "tuned": ("after", ["--quotas", "--eps", str(1e-8 * PASSES)], {"gradient_clipping": CLIPPING * PASSES}),
    "before, 6": ("before", [], SIX),
    "quotas, 6": ("after", ["--quotas"], SIX),
    "uneven": ("before", [], {"gradient_accumulation_passes": 7}),
}


@on_two_ranks
def from_pipelinerl(folder):
    """What every run says; the traces lie in the folder by their names."""
    Path(folder).mkdir(exist_ok=True)
    return {name: _train(Path(folder), name, *run) for name, run in RUNS.items()}


def _script(name):
    # A script, which imports its neighbours by their names from its own folder.
    sys.path.insert(0, str(TOOLS))
    return importlib.import_module(name)


def _train(folder, name, loop, flags, changes):
    """Run a loop as its command line does; return its exit code and what it printed."""
    config, trace = folder / f"{name}.{dist.get_rank()}.json", folder / f"{name}.jsonl"
    usual = {"gradient_accumulation_passes": PASSES, "gradient_clipping": CLIPPING}
    config.write_text(json.dumps(READY | usual | changes))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = _script(loop).main(["--trace", str(trace), "--config", str(config), *SMALL, *flags])
    return [code, said.getvalue()]


SAID = r"(?m)^(?:before|after|as found): (\d+) passes, (\d+) idle on a rank, weights (\w{12})$"


class Runs:
    def __init__(self, two_ranks):
        self._folder = two_ranks.folder_of(from_pipelinerl)
        self._said = two_ranks.of(from_pipelinerl)

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
        """Both round the gradient's one factor, ranks / target, once; their loss is times the rounded 1 / target."""
        assert runs.said("quotas, 6") == runs.said("before, 6")
        assert runs.norms("quotas, 6") == runs.norms("before, 6")
        assert runs.compared("before, 6", "quotas, 6").equal
        assert runs.losses("quotas, 6") != runs.losses("before, 6")


class TestAsFound:
    def test_the_gradient_is_divided_by_the_passes_once_more(self, runs):
        """Exactly at first; then weights differ, because other steps are clipped (measured: norms by 2.4e-4)."""
        as_found, right = runs.norms("found"), runs.norms("before")
        assert as_found[0] * PASSES == right[0]
        assert [norm * PASSES for norm in as_found] == pytest.approx(right, rel=1e-3)
        reference, candidate = runs.trace("before"), runs.trace("found")
        found = diagnose(reference, candidate, compare(reference, candidate, Tier.REASSOCIATED))
        # Windows have as many rollouts as gradient_accumulation_steps, so that the record fits both.
        assert {"divided-already", "gas-scaled-twice"} <= {cause.name for cause in grouped(found.causes)[0]}
        assert "or 1 / total times the reference's" in found.causes[0].evidence

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
        as_found, right = ([step.tokens for step in runs.trace(name).steps] for name in ("found", "before"))
        assert all(a != b for a, b in zip(as_found, right, strict=True))
        assert right == [step.tokens for step in runs.trace("after").steps]


def test_quotas_that_cannot_be_equal_are_refused_in_one_message(two_ranks):
    code, said = two_ranks.of(from_pipelinerl)["uneven"]
    assert code == 2
    assert said == "before.py: gradient_accumulation_passes = 7: quotas must be equal, so 2 ranks must divide it\n"
