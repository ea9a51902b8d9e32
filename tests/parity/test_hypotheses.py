"""The torch reference computes what known faults would make of a step; a loop with such a fault has these figures."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.diagnosis import Fit, diagnose, grouped
from ds_parity.parity.diagnosis.causes import REMEDIES
from ds_parity.parity.diagnosis.meanings import COMPUTED
from ds_parity.parity.running.recording import Recorder
from ds_parity.parity.subjects.oracle import weighs, windows_of
from ds_parity.parity.subjects.references import supposed
from ds_parity.parity.subjects.references.alone import train_alone
from ds_parity.parity.subjects.references.bare import metrics_of
from ds_parity.parity.subjects.references.torch_counterparts import clipped_step, optimizer_and_scheduler
from ds_parity.parity.verification.control_scenarios import scenario
from ds_parity.sketches import sketch_of
from ds_parity.trace import StepRecord, read_trace


@pytest.fixture(scope="module")
def wanted():
    return scenario("tokens", {"zero_optimization": {"stage": 1}})


@pytest.fixture(scope="module")
def reference(wanted, tmp_path_factory):
    return trained(wanted, "torch", tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def even(wanted, tmp_path_factory):
    """The trace of a loop that gives each micro-batch the same share."""
    return trained(wanted, "plain", tmp_path_factory.mktemp("even"), EvenShares(wanted))


def trained(wanted, engine, folder, run=train_alone):
    with Recorder(folder, wanted, engine) as recorder:
        run(wanted, recorder)
    return read_trace(folder / wanted.name / f"{engine}.jsonl")


class Keeping(torch.nn.Module):
    """The bundled decoder, which keeps its last logits: torch can't copy them while they have a graph."""

    def __init__(self, seed):
        super().__init__()
        self.decoder, self.last = build_tiny(seed), None

    def forward(self, input_ids):
        self.last = self.decoder(input_ids)
        return self.last


def test_a_model_that_keeps_its_output_has_the_same_hypotheses(wanted, tmp_path):
    models = (f"{__name__}:Keeping", "ds_parity.parity.data.model:build_tiny")
    kept, right = (
        trained(replace(wanted, model=model, windows=2), "torch", tmp_path / str(number))
        for number, model in enumerate(models)
    )
    assert [one.hypotheses for one in kept.steps] == [one.hypotheses for one in right.steps]
    assert all(one.hypotheses for one in kept.steps)


class Loop:
    """A plain loop in fp32 over the micro-batches of all ranks, one after another; a fault overrides a method."""

    limit = None  # that of the configuration

    def __init__(self, wanted):
        self.wanted, self.settings, self.passes = wanted, wanted.settings, wanted.batches()
        self.model = wanted.build()
        self.window = None

    def batches(self):
        """Return (pass, rank, micro-batch) of the window, but idle ones."""
        places = range(self.window.first, self.window.last + 1)
        return [(at, r, one) for at in places for r, one in enumerate(self.passes[at]) if not one.idle]

    def share(self, at, rank, batch):
        """Return what the micro-batch's mean loss is multiplied by."""
        return weighs(batch, self.settings) / self.window.total

    def loss(self, at, rank, batch):
        """Return the mean loss of a micro-batch."""
        return self.model(**batch.inputs)

    def before_step(self, optimizer):
        """Change the gradient, or the optimizer."""

    def after_step(self):
        """Clear the gradient."""
        self.model.zero_grad()

    def __call__(self, wanted, record):
        optimizer, scheduler = optimizer_and_scheduler(wanted, self.model)
        record.begin(self.model)
        for number, window in enumerate(windows_of(self.passes, self.settings), start=1):
            self.window = window
            logged = 0.0
            for at, rank, batch in self.batches():
                loss = self.loss(at, rank, batch)
                logged += float(loss.detach()) * weighs(batch, self.settings) / self.window.total
                (loss * self.share(at, rank, batch)).backward()
            self.before_step(optimizer)
            lr = tuple(float(group["lr"]) for group in optimizer.param_groups)
            norm = clipped_step(self.model, optimizer, wanted, self.limit)
            self.after_step()
            scheduler.step()
            held = [batch for row in self.passes[self.window.first : self.window.last + 1] for batch in row]
            counts = {name: sum(getattr(one, name) for one in held) for name in ("rollouts", "prompts", "tokens")}
            passes = {"passes": len(held) // wanted.ranks, "idle_passes": sum(one.idle for one in held)}
            figures = {"total": self.window.total, "loss": logged, "lr": lr, "grad_norm": norm}
            record(StepRecord(step=number, **counts, **passes, **figures, metrics=metrics_of(held)), self.model)


class LastPassAlone(Loop):
    def share(self, at, rank, batch):
        return super().share(at, rank, batch) * (at == self.window.last)


class FirstPassLostLater(Loop):
    def share(self, at, rank, batch):
        return super().share(at, rank, batch) * (at != self.window.first or at == 0)


class FirstPassesLostOnce(Loop):
    def share(self, at, rank, batch):
        lost = self.window.first == 4 and at < 6
        return 0.0 if lost else super().share(at, rank, batch)


class LastPassLost(Loop):
    def share(self, at, rank, batch):
        return super().share(at, rank, batch) * (at != self.window.last)


class EvenShares(Loop):
    def share(self, at, rank, batch):
        return 1 / len(self.batches())


class PartOfEvenShares(Loop):
    def share(self, at, rank, batch):
        return 0.4 / len(self.batches()) + 0.6 * super().share(at, rank, batch)


class MeansOfRanks(Loop):
    def share(self, at, rank, batch):
        return batch.tokens / sum(one.tokens for _, r, one in self.batches() if r == rank) / self.wanted.ranks


class RunningTotal(Loop):
    def share(self, at, rank, batch):
        return batch.tokens / sum(one.tokens for a, _, one in self.batches() if a <= at)


class ByRollouts(Loop):
    def share(self, at, rank, batch):
        return batch.rollouts / sum(one.rollouts for _, _, one in self.batches())


class RankAlone(Loop):
    def share(self, at, rank, batch):
        return super().share(at, rank, batch) * self.wanted.ranks * (rank == 0)


class RankLeftOut(Loop):
    def share(self, at, rank, batch):
        return super().share(at, rank, batch) * (rank == 0)


class GradientKept(Loop):
    """zero_grad() runs only every other step."""

    def after_step(self):
        if self.window.first:
            super().after_step()


class OtherMean(Loop):
    def loss(self, at, rank, batch):
        self.model.loss_weight = "rollout"
        return super().loss(at, rank, batch)


class Unmasked(Loop):
    def inputs(self, batch):
        return {**batch.inputs, "loss_mask": torch.ones_like(batch.inputs["loss_mask"])}

    def loss(self, at, rank, batch):
        mask = self.inputs(batch)["loss_mask"]
        return self.model(**self.inputs(batch)) * (mask.sum() / batch.tokens)


class MaskLeftOut(Unmasked):
    def inputs(self, batch):
        inputs = super().inputs(batch)
        for row, one in enumerate(batch.held):
            inputs["loss_mask"][row, len(one.tokens) - 1 :] = 0  # padding is masked all the same
        return inputs

    def loss(self, at, rank, batch):
        return self.model(**self.inputs(batch))


class OthersAdvantages(Loop):
    def loss(self, at, rank, batch):
        first = torch.cat([row[rank].inputs["advantages"] for row in self.passes if not row[rank].idle])
        return self.model(**{**batch.inputs, "advantages": first[: len(batch.held)]})


class NoAdvantages(Loop):
    def loss(self, at, rank, batch):
        return self.model(**{**batch.inputs, "advantages": torch.ones_like(batch.inputs["advantages"])})


class LostAfterIdle(Loop):
    def loss(self, at, rank, batch):
        silent = at > 0 and self.passes[at - 1][rank].idle
        return super().loss(at, rank, batch) * (0.0 if silent else 1.0)


FAULTS = {
    LastPassAlone: {"last-backward-only", "last-backward-by-caller"},
    FirstPassLostLater: {"sticky-boundary"},
    FirstPassesLostOnce: {"mid-window-checkpoint"},
    LastPassLost: {"last-pass-lost"},
    EvenShares: {"mean-of-micro-batches"},
    PartOfEvenShares: {"aux-term-scaled-apart"},
    MeansOfRanks: {"half-broadcast"},
    RunningTotal: {"running-total"},
    ByRollouts: {"weighed-by-another-unit"},
    RankAlone: {"late-boundary"},
    RankLeftOut: {"rank-left-out"},
    GradientKept: {"gradient-not-zeroed"},
    OtherMean: {"mixed-weights"},
    Unmasked: {"unmasked-numerator"},
    MaskLeftOut: {"mask-left-out"},
    OthersAdvantages: {"global-metadata"},
    NoAdvantages: {"advantages-left-out"},
    LostAfterIdle: {"shared-padding"},
}


class ClippedOverRanks(Loop):
    limit = 0.25


class ClippedTimesRanks(Loop):
    limit = 1.0


class NotClipped(Loop):
    limit = float("inf")


class OptimizerAfresh(Loop):
    def before_step(self, optimizer):
        if self.window.first > 10:
            self.begun = getattr(self, "begun", 0) + 1
        if getattr(self, "begun", 0) == 1:
            optimizer.state.clear()


class StepCountAfresh(OptimizerAfresh):
    def before_step(self, optimizer):
        kept = dict(optimizer.state)
        super().before_step(optimizer)
        if not optimizer.state:
            optimizer.state.update(kept)
            for state in kept.values():
                state["step"] = torch.zeros_like(state["step"])


class NoDecay(Loop):
    def before_step(self, optimizer):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0


CLIPPED = {
    ClippedOverRanks: {"clip-at-wrong-scale"},
    ClippedTimesRanks: {"clip-at-wrong-scale", "implicit-clip"},  # twice the limit of 0.5 is the default
    NotClipped: {"clipping-left-out"},
    # A rate of 3 leaves the next step gradients that tell neither, and a momentum of 0 has these figures, too.
    OptimizerAfresh: {"resume-loses-optimizer", "momentum"},
}
OF_ADAM = {
    OptimizerAfresh: {"resume-loses-optimizer"},
    StepCountAfresh: {"adam-step-count"},
    NoDecay: {"weight-decay"},
    EvenShares: {"mean-of-micro-batches"},
    OtherMean: {"mixed-weights"},
}


def diagnosed(reference, candidate, dtype="fp32"):
    return diagnose(reference, candidate, compare(reference, candidate, Tier.REASSOCIATED, dtype))


def test_every_fault_that_is_computed_has_a_loop_here_and_a_remedy():
    named = set().union(*(names for faults in (FAULTS, CLIPPED, OF_ADAM) for names in faults.values()))
    # What is named beside a computed cause, and is read off the weights.
    assert named - {"aux-term-scaled-apart", "momentum"} == COMPUTED - {"first-passes-lost"}
    assert set(REMEDIES) >= COMPUTED


def test_a_loop_without_a_fault_is_equal(wanted, reference, tmp_path):
    assert compare(reference, trained(wanted, "plain", tmp_path, Loop(wanted)), Tier.REASSOCIATED).equal


@pytest.mark.parametrize("fault", FAULTS, ids=lambda it: it.__name__)
def test_a_loop_with_a_fault_has_its_figures_and_no_others(fault, wanted, reference, tmp_path):
    found = diagnosed(reference, trained(wanted, "plain", tmp_path, fault(wanted)))
    first = grouped(found.causes)[:1]
    assert {cause.name for group in first for cause in group} == FAULTS[fault], found
    assert found.causes[0].fit is Fit.COMPUTED
    assert found.not_excluded == ()


def test_ranks_that_read_one_shard_have_the_figures_of_one_rank_too(wanted, reference, tmp_path):
    """Where neither tokens nor other counts are recorded: the loss, too, is that of one rank."""
    uncounted = dict.fromkeys(("passes", "idle_passes", "rollouts", "prompts", "tokens", "total"))

    candidate = trained(wanted, "plain", tmp_path, RankAlone(wanted))
    steps = [it.model_copy(update={**uncounted, "weights": None}) for it in candidate.steps]
    alone = next(it for name, it in reference.steps[0].hypotheses.items() if name.startswith("rank-alone"))
    steps[0] = steps[0].model_copy(update={"loss": alone.loss, "grad_norm": alone.grad_norm})
    header = candidate.header.model_copy(update={"records": ("step", "loss", "grad_norm")})
    found = diagnosed(reference, replace(candidate, header=header, steps=tuple(steps)))
    assert {cause.name for cause in grouped(found.causes)[0]} == {"late-boundary", "data-or-seed"}, found


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    """A scenario that clips every step, and the reference's trace of it."""
    wanted = scenario("clipped", {"zero_optimization": {"stage": 1}})
    return wanted, trained(wanted, "torch", tmp_path_factory.mktemp("clipped"))


@pytest.mark.parametrize("fault", CLIPPED, ids=lambda it: it.__name__)
def test_clipping_and_the_state_of_sgd_are_computed(fault, clipped, tmp_path):
    wanted, right = clipped
    found = diagnosed(right, trained(wanted, "plain", tmp_path, fault(wanted)))
    assert {cause.name for cause in grouped(found.causes)[0]} == CLIPPED[fault], found


@pytest.fixture(scope="module")
def with_adam(wanted, tmp_path_factory):
    """A scenario that steps by AdamW, and the reference's trace of it."""
    params = {"lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.1}
    warmup = {"warmup_num_steps": 10, "warmup_min_lr": 0.001, "warmup_max_lr": 0.002, "warmup_type": "linear"}
    given = {"optimizer": {"type": "AdamW", "params": params}, "scheduler": {"type": "WarmupLR", "params": warmup}}
    wanted = replace(wanted, config={**wanted.config, **given})
    return wanted, trained(wanted, "torch", tmp_path_factory.mktemp("adam"))


@pytest.mark.parametrize("fault", OF_ADAM, ids=lambda it: it.__name__)
def test_faults_of_runs_with_adam_are_computed(fault, with_adam, tmp_path):
    wanted, right = with_adam
    found = diagnosed(right, trained(wanted, "plain", tmp_path, fault(wanted)))
    assert {cause.name for cause in grouped(found.causes)[0]} == OF_ADAM[fault], found


@pytest.mark.parametrize("number", range(12))
def test_other_shares_are_none_of_these(number, wanted, reference, tmp_path):
    """Shares that nobody has written a rule for: the cause is unknown, and what was computed is excluded.

    With the bounds of bf16, in which norms and weights are right to some 2 %, none is named either.
    """
    draw = random.Random(number)

    class Drawn(Loop):
        def share(self, at, rank, batch):
            return super().share(at, rank, batch) * (1 + draw.choice((-0.2, 0.0, 0.1, 0.5)))

    candidate = trained(wanted, "plain", tmp_path, Drawn(wanted))
    found = diagnosed(reference, candidate)
    assert found.causes == ()
    assert not set(found.not_excluded) & (COMPUTED | {"aux-term-scaled-apart"})
    assert diagnosed(reference, candidate, "bf16").causes == ()


def test_a_norm_that_is_a_little_off_is_not_that_of_a_hypothesis(wanted, reference, tmp_path):
    candidate = trained(wanted, "plain", tmp_path, LastPassAlone(wanted))
    norm = candidate.steps[0].grad_norm * (1 + 1e-5)
    off = replace(candidate, steps=(candidate.steps[0].model_copy(update={"grad_norm": norm}), *candidate.steps[1:]))
    assert diagnosed(reference, off).causes == ()


def test_without_weights_the_norm_and_the_loss_tell(wanted, reference, tmp_path):
    """Also where the candidate is a trace that records no weights."""
    candidate = trained(wanted, "plain", tmp_path, OtherMean(wanted))
    steps = tuple(one.model_copy(update={"weights": None}) for one in candidate.steps)
    bare = replace(reference, steps=tuple(one.model_copy(update={"weights": None}) for one in reference.steps))
    assert {cause.name for cause in diagnosed(bare, replace(candidate, steps=steps)).causes} == {"mixed-weights"}


def test_hypotheses_that_are_the_same_in_the_data_are_named_together(tmp_path):
    """In windows of two passes, the last pass alone is the window without its first one."""
    config = {"zero_optimization": {"stage": 1}}
    wanted = replace(scenario("tokens", config), shape="full", short=0, windows=3)
    two = [window for window in windows_of(wanted.batches(), wanted.settings) if window.last - window.first == 1]
    draws = (replace(wanted, draw=draw) for draw in range(400))
    wanted = wanted if len(two) == 3 else next(one for one in draws if _all_of_two(one))
    found = diagnosed(trained(wanted, "torch", tmp_path), trained(wanted, "plain", tmp_path, LastPassAlone(wanted)))
    assert {cause.name for cause in found.causes} == {
        *("last-backward-only", "last-backward-by-caller", "first-passes-lost")
    }
    assert len(grouped(found.causes)) == 1


def _all_of_two(wanted):
    return all(one.last - one.first == 1 for one in windows_of(wanted.batches(), wanted.settings))


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -float("inf"), 1e154, 1e308, -1.0, 0.0])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_norm_that_no_step_has_is_no_part_of_a_fault(reference, even, norm, at):
    """A part of a fault is a root of a polynomial, and numpy raises for one whose numbers are not finite."""
    steps = list(even.steps)
    steps[at] = steps[at].model_copy(update={"grad_norm": norm})
    for right, wrong in ((reference, replace(even, steps=tuple(steps))), (even, reference)):
        found = diagnosed(right, wrong)
        assert found.certain[0].startswith("first to differ"), found


def test_where_rounding_is_wider_than_hypotheses_lie_apart_none_is_named(reference, even):
    """In bf16 a norm is right to 2 %: without weights, several faults have it."""
    bare = [
        replace(trace, steps=tuple(one.model_copy(update={"weights": None}) for one in trace.steps))
        for trace in (reference, even)
    ]
    assert [cause.name for cause in diagnosed(*bare).causes] == ["mean-of-micro-batches"]
    assert diagnosed(*bare, "bf16").causes == ()


def test_a_hypothesis_says_where_the_weights_would_lie(reference, even):
    apart = [y - x for x, y in zip(*(t.steps[0].weights.sketch for t in (reference, even)), strict=True)]
    folded = [sum(apart[at::8]) for at in range(8)]
    assert reference.steps[0].hypotheses["mean-of-micro-batches"].apart == pytest.approx(folded, rel=0.02, abs=1e-5)


class TestCost:
    def test_only_the_first_steps_of_small_models_are_computed(self, wanted, tmp_path, monkeypatch):
        monkeypatch.setattr(supposed, "MOST_STEPS", 2)
        few = trained(wanted, "torch", tmp_path / "few")
        assert [one.hypotheses is not None for one in few.steps] == [True, True, False, False, False]
        monkeypatch.setattr(supposed, "MOST_WEIGHTS", 100)
        none = trained(wanted, "torch", tmp_path / "none")
        assert all(one.hypotheses is None for one in none.steps)

    def test_a_record_that_takes_none_gets_none(self, wanted):
        lines = []
        train_alone(wanted, lambda line, module: lines.append(line))
        assert all(line.hypotheses is None for line in lines)

    def test_several_terms_have_none(self, tmp_path):
        wanted = scenario("terms", {"zero_optimization": {"stage": 1}})
        assert all(one.hypotheses is None for one in trained(wanted, "torch", tmp_path).steps)

    def test_a_step_takes_less_than_six_kilobytes_more(self, reference):
        longest = max(len(one.model_dump_json()) for one in reference.steps)
        without = max(len(one.model_copy(update={"hypotheses": None}).model_dump_json()) for one in reference.steps)
        assert longest - without < 6000

    def test_training_goes_on_as_without(self, wanted, reference):
        lines = []
        train_alone(wanted, lambda line, module: lines.append((line, sketch_of([vector(module)]))))
        for (line, sketch), one in zip(lines, reference.steps, strict=True):
            assert (line.loss, line.grad_norm, sketch) == (one.loss, one.grad_norm, one.weights.sketch)


def vector(module):
    return torch.cat([parameter.detach().float().flatten() for parameter in module.parameters()])


OFTEN, SELDOM = ("rollouts", "averaged", "caller"), ("uniform", "weights", "prompts", "clipped")


@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM)])
def test_every_scenario_of_one_term_has_hypotheses_and_the_right_loss_among_none(name, tmp_path):
    wanted = scenario(name, {"zero_optimization": {"stage": 1}})
    first = trained(replace(wanted, windows=2), "torch", tmp_path).steps[0]
    assert {"last-pass-alone", "rank-left-out:0"} <= first.hypotheses.keys()
    assert all(Fraction(it.grad_norm) > 0 for it in first.hypotheses.values())
