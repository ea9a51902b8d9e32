"""What sketches of weights say of a fault: small problems, really trained, with one thing changed."""

from hashlib import sha256

import numpy as np
import pytest
from pydantic import BaseModel

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace, Weights

SIZE, STEPS = 400, 6
RNG = np.random.default_rng(0)
TARGETS = RNG.normal(size=(STEPS, SIZE))
SIGNS = RNG.choice([-1.0, 1.0], size=(16, SIZE))
START = RNG.normal(size=SIZE) * 20
RATES = (0.01, 0.012, 0.014, 0.016, 0.018, 0.02)
MOMENTUM = 0.9
OTHER = RNG.normal(size=SIZE)


class Run:
    """SGD with momentum towards another target in each step, and hooks for faults."""

    momentum = MOMENTUM

    def gradient(self, at, gradient):
        return gradient

    def logged_norm(self, at, gradient):
        return np.linalg.norm(gradient)

    def entering(self, at, gradient):
        return gradient

    def rate(self, at):
        return RATES[at]

    def state(self, at, buffer):
        return buffer

    def after(self, at, weights, before):
        return weights

    def kept(self, weights):
        return weights

    def trace(self):
        weights, buffer, steps = START.copy(), np.zeros(SIZE), []
        for at in range(STEPS):
            gradient = self.gradient(at, TARGETS[at] + 1e-3 * (weights - START))
            norm = self.logged_norm(at, gradient)
            buffer = self.momentum * self.state(at, buffer) + self.entering(at, gradient)
            before, weights = weights, weights - self.rate(at) * buffer
            weights = self.after(at, weights, before)
            steps.append(record(at + 1, norm, self.kept(weights)))
        header = Header(
            scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="a", engine="loop", optimizer="SGD"
        )
        return Trace(header, tuple(steps))


def record(step, norm, weights):
    summary = Weights(
        checksum=sha256(weights.tobytes()).hexdigest(),
        norm=float(np.linalg.norm(weights)),
        sketch=tuple((SIGNS @ weights).tolist()),
    )
    counts = {"passes": 4, "idle_passes": 0, "rollouts": 12, "prompts": 3, "tokens": 900 + step}
    figures = {"total": 900.0 + step, "loss": 0.5 + step, "lr": (RATES[step - 1],), "grad_norm": float(norm)}
    return StepRecord(step=step, **counts, **figures, weights=summary)


class Decayed(Run):
    """Weight decay beside the gradient, as AdamW has it."""

    def after(self, at, weights, before):
        return weights - 0.1 * RATES[at] * before


class InTheGradient(Run):
    """Weight decay in the gradient, behind the norm that is logged."""

    def entering(self, at, gradient):
        return gradient + 0.01 * START


class ScaledByHand(Run):
    def after(self, at, weights, before):
        return weights * 0.999


class LostState(Run):
    def state(self, at, buffer):
        return buffer * 0 if at == 3 else buffer


class LateRate(Run):
    def rate(self, at):
        return RATES[max(at - 1, 0)]


class OlderWeights(Run):
    def after(self, at, weights, before):
        return before if at == 3 else weights


class OlderStart(Run):
    """A step from the weights of before the last one, as of an optimizer whose own copy was not loaded."""

    def trace(self):
        self.earlier = [START]
        return super().trace()

    def after(self, at, weights, before):
        self.earlier.append(weights - before + self.earlier[-2] if at == 3 else weights)
        return self.earlier[-1]


class OlderStartOfDecay(OlderStart):
    """The weights decay, and those of before the last step by as much less as they are off by."""

    decay = 0.01

    def after(self, at, weights, before):
        off = before - self.earlier[-2] if at == 3 else 0
        return super().after(at, weights + self.decay * off, before)


class Factor(Run):
    """The whole gradient of every step off by a factor that is no count."""

    def gradient(self, at, gradient):
        return gradient * (1.3, 0.8, 1.7, 0.6, 1.2, 0.9)[at]


class OneStep(Run):
    """One step is divided by a fourth of what it should be."""

    def gradient(self, at, gradient):
        return gradient * 4 if at == 3 else gradient


class ToBf16(Run):
    def kept(self, weights):
        whole = weights.astype(np.float32).view(np.uint32)
        return ((whole + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)


class Mixed(Run):
    """Another sum of the micro-batches' gradients."""

    def gradient(self, at, gradient):
        return gradient + 0.5 * np.roll(gradient, 7)


class Clipped(Run):
    """The gradient enters smaller by a factor of no meaning."""

    def entering(self, at, gradient):
        return gradient * (0.7 if at > 1 else 1.0)


class ClippedToOne(Run):
    def entering(self, at, gradient):
        return gradient / np.linalg.norm(gradient) if at > 1 else gradient


class Shuffled(Run):
    """Another update in no direction that one knows."""

    def after(self, at, weights, before):
        return weights + 0.05 * OTHER if at > 1 else weights


NAMED = {
    Decayed: "weight-decay",
    InTheGradient: "weight-decay",
    ScaledByHand: "weights-scaled-by-hand",
    LostState: "resume-loses-optimizer",
    LateRate: "lr-in-use",
    OlderWeights: "weights-of-the-step-before",
    OlderStart: "weights-of-the-step-before",
    Factor: "another-divisor",
    OneStep: "another-divisor",
    ToBf16: "weights-in-bf16",
    ClippedToOne: "implicit-clip",
}


class Start(BaseModel):
    sketch: tuple[float, ...]
    norm: float
    dtype: str = "fp32"


class Started(Header):
    """A header that tells of the weights before the first step."""

    start: Start | None = None


def started(run, at):
    trace = run().trace()
    start = Start(sketch=tuple((SIGNS @ at).tolist()), norm=float(np.linalg.norm(at)))
    header = Started(**{**trace.header.model_dump(), "start": start})
    return Trace(header, trace.steps)


class FirstToOne(Run):
    def entering(self, at, gradient):
        return gradient / np.linalg.norm(gradient) if at == 0 else gradient


class FirstFactor(Run):
    """The first step alone is off by a factor: the next ones have the reference's gradient."""

    def gradient(self, at, gradient):
        return gradient * 1.3 if at == 0 else gradient


class OtherStart(Run):
    def kept(self, weights):
        return weights + OTHER


def test_where_headers_tell_the_start_the_first_update_is_read_too():
    for fault, name in ((FirstToOne, "implicit-clip"), (FirstFactor, "another-divisor")):
        a, b = started(Run, START), started(fault, START)
        found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
        assert [cause.name for cause in found.causes] == [name]
        assert name not in {cause.name for cause in diagnosed(fault).causes}, "without the start it can't be told"


def test_other_weights_before_the_first_step_are_the_cause():
    a, b = started(Run, START), started(OtherStart, START + OTHER)
    b = Trace(b.header, tuple(one.model_copy(update={"loss": 0.7 * one.step}) for one in b.steps))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert found.causes[0].name == "initial-weights"
    assert "weights" in found.classes


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weights_of_the_step_before_are_named_where_they_decay(momentum):
    a, b = (with_momentum(run, momentum)().trace() for run in (Run, OlderStartOfDecay))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert {cause.name for cause in found.causes} == {"weights-of-the-step-before"}, found
    a, b = (Trace(one.header, one.steps[:4]) for one in (a, b))
    (group,) = grouped(diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes)
    may_be = {"weights-of-the-step-before", "resume-loses-optimizer", "momentum"}
    assert {cause.name for cause in group} == may_be, "a momentum of 0.99 that was lost gives the same last step"


class FarTooSlow(Run):
    """A rate is used that is a small part of the logged one."""

    def rate(self, at):
        return 5e-4 * RATES[at]


class FirstLost(Run):
    def after(self, at, weights, before):
        return before if at == 0 else weights


def test_weights_that_move_by_little_have_lost_no_update():
    a, b = started(Run, START), started(FarTooSlow, START)
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert not {"update-lost", "weights-of-the-step-before"} & {cause.name for cause in found.causes}, found
    assert any("0.0005 times its length" in said for said in found.certain), found


def test_weights_that_the_first_step_leaves_are_those_before_it():
    a, b = started(Run, START), started(FirstLost, START)
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert "update-lost" in {cause.name for cause in found.causes}
    assert "they are those before step 1" in found.causes[0].evidence


class Limited(Run):
    """Every gradient is clipped to the limit."""

    momentum, limit = 0.0, 4.0

    def entering(self, at, gradient):
        return gradient * self.limit / np.linalg.norm(gradient)


class OfHalfTheLimit(Limited):
    limit = 2.0


class OfHalfTheRate(Limited):
    def rate(self, at):
        return RATES[at] / 2


@pytest.mark.parametrize("fault", [OfHalfTheLimit, OfHalfTheRate])
def test_a_rate_in_use_that_is_one_over_the_ranks_looks_like_clipping_at_a_wrong_scale(fault):
    a, b = started(Limited, START), started(fault, START)
    (group,) = grouped(diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes)
    assert {cause.name for cause in group} == {"clip-at-wrong-scale", "lr-in-use"}


class LimitedAtTimes(Limited):
    """Gradients of some steps are far longer than the limit; those of the others lie below it, and above its half."""

    def gradient(self, at, gradient):
        return gradient * (1.0, 0.15, 0.12)[at % 3]

    def entering(self, at, gradient):
        return gradient * min(1.0, self.limit / np.linalg.norm(gradient))


class AtTimesOfHalfTheLimit(LimitedAtTimes):
    limit = 2.0


def test_half_a_limit_that_does_not_halve_every_update_is_no_rate_in_use():
    a, b = started(LimitedAtTimes, START), started(AtTimesOfHalfTheLimit, START)
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert {cause.name for cause in found.causes} == {"clip-at-wrong-scale"}


class NotZeroed(Run):
    """Every gradient is added to those of all steps before."""

    def entering(self, at, gradient):
        self.summed = gradient + (self.summed if at else 0.0)
        return self.summed


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_gradients_that_are_not_set_to_zero_are_named_beside_a_momentum_of_one_where_no_norm_tells(momentum):
    a, b = (started(with_momentum(run, momentum), START) for run in (Run, NotZeroed))
    a, b = (Trace(it.header, tuple(one.model_copy(update={"grad_norm": None}) for one in it.steps)) for it in (a, b))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert "gradient-not-zeroed" in {cause.name for cause in grouped(found.causes)[0]}, found


class Rests(Run):
    """The step behind the fourth one has a rate of 0."""

    def rate(self, at):
        return 0.0 if at == 4 else 0.01


class LosesStateBeforeARest(Rests):
    def state(self, at, buffer):
        return 0 * buffer if at == 3 else buffer


class OlderStartBeforeARest(Rests, OlderStart):
    pass


AT_REST = {"a rate of 0": {"lr": (0.0,)}, "a skipped step": {"skipped": True, "grad_norm": None}}


def resting(run, momentum, rest="a rate of 0"):
    """A run whose log tells of the rest."""
    trace = with_momentum(run, momentum)().trace()
    changes = {5: AT_REST[rest]}
    steps = [one.model_copy(update={"lr": (0.01,)} | changes.get(one.step, {})) for one in trace.steps]
    return Trace(trace.header, tuple(steps))


@pytest.mark.parametrize("rest", AT_REST)
@pytest.mark.parametrize(("momentum", "others"), [(0.9, set()), (0.99, {"weights-of-the-step-before"})])
def test_a_momentum_that_is_lost_before_a_step_without_an_update_is_named(momentum, others, rest):
    a, b = (resting(run, momentum, rest) for run in (Rests, LosesStateBeforeARest))
    (group,) = grouped(diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes)
    assert {cause.name for cause in group} == {"resume-loses-optimizer", "momentum", *others}


@pytest.mark.parametrize("rest", AT_REST)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weights_of_the_step_before_are_no_lost_momentum_before_a_step_without_an_update(momentum, rest):
    """The whole update before is missing: the momentum would be 1, which no run has."""
    a, b = (resting(run, momentum, rest) for run in (Rests, OlderStartBeforeARest))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert {cause.name for cause in found.causes} == {"weights-of-the-step-before"}


class Steady(Run):
    def rate(self, at):
        return 0.01


class SteadyLostState(Steady, LostState):
    pass


@pytest.mark.parametrize("momentum", [0.985, 0.99])
def test_a_momentum_near_one_that_is_lost_is_told_from_weights_of_the_step_before_by_the_next_step(momentum):
    """Weights of the step before stay as far apart."""
    a, b = (with_momentum(run, momentum)().trace() for run in (Steady, SteadyLostState))
    a, b = (Trace(it.header, tuple(one.model_copy(update={"lr": (0.01,)}) for one in it.steps)) for it in (a, b))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert {cause.name for cause in found.causes} == {"resume-loses-optimizer"}


def diagnosed(fault):
    a, b = Run().trace(), fault().trace()
    return diagnose(a, b, compare(a, b, Tier.REASSOCIATED))


def test_the_same_run_twice_has_nothing_to_explain():
    assert diagnosed(Run).classes == ()


@pytest.mark.parametrize("fault", NAMED)
def test_a_direction_that_only_one_fault_gives_names_it(fault):
    found = diagnosed(fault)
    assert found.causes, found
    assert NAMED[fault] in {cause.name for cause in grouped(found.causes)[0]}, found


class Wide(Run):
    """Plain SGD, whose updates are long beside the weights."""

    momentum = 0.0

    def entering(self, at, gradient):
        return 30 * gradient


class FirstShort(Wide):
    """The first update alone is 0.9 times as long: from then on the weights stay as far apart as bf16 rounds."""

    def entering(self, at, gradient):
        return super().entering(at, gradient) * (1.0 if at else 0.9)


class WideToBf16(Wide, ToBf16):
    pass


@pytest.mark.parametrize(("fault", "rounded"), [(FirstShort, False), (WideToBf16, True)])
def test_weights_that_one_step_took_apart_are_not_rounded(fault, rounded):
    a, b = Wide().trace(), fault().trace()
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert ("weights-in-bf16" in {cause.name for cause in found.causes}) == rounded, found


class Displaced(Wide):
    """Weights that lie apart by so many times what bf16 rounds, in directions that change."""

    times = (1.0,) * STEPS

    def after(self, at, weights, before):
        self.at = at
        return weights

    def kept(self, weights):
        return weights + 0.6 * self.times[self.at] * DIRECTIONS[self.at]


class DisplacedByLittle(Displaced):
    times = (0.55, *(1.0,) * (STEPS - 1))


class FirstShortAndTurned(Displaced):
    """The first update is shorter; behind it other gradients take the weights elsewhere, each on its own."""

    times = (0.0, *(0.5,) * (STEPS - 1))

    def entering(self, at, gradient):
        return super().entering(at, gradient) * (1.0 if at else 0.92)


DIRECTIONS = np.linalg.qr(np.random.default_rng(3).normal(size=(SIZE, STEPS)))[0].T


@pytest.mark.parametrize(
    ("fault", "rounded"),
    [(FirstShortAndTurned, False), (DisplacedByLittle, False), (Displaced, True), (WideToBf16, True)],
)
def test_weights_that_are_rounded_lie_as_far_apart_at_once_and_not_along_the_update(fault, rounded):
    a, b = started(Wide, START), started(fault, START)
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert ("weights-in-bf16" in {cause.name for cause in found.causes}) == rounded, found


class Short(Run):
    """Plain SGD, whose updates are shorter than what bf16 resolves."""

    momentum = 0.0

    def entering(self, at, gradient):
        return 1e-3 * gradient


class Swallowed(Short):
    """Weights that are trained in bf16 stay where they are, and part from the others by each whole update."""

    def after(self, at, weights, before):
        return ToBf16.kept(self, weights)


class Stopped(Short):
    """No update is made, and nothing is rounded."""

    def after(self, at, weights, before):
        return before


@pytest.mark.parametrize(("fault", "rounded"), [(Swallowed, True), (Stopped, False)])
def test_updates_that_rounding_swallows_are_rounded(fault, rounded):
    a, b = Short().trace(), fault().trace()
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert ("weights-in-bf16" in {cause.name for cause in found.causes}) == rounded, found


class Negated(Run):
    """Short gradients, the other way."""

    def gradient(self, at, gradient):
        return -gradient * (1 + 0.1 * at) / 60


class Aside(Run):
    """Short gradients that have nothing to do with the right ones."""

    def gradient(self, at, gradient):
        other = np.roll(gradient, 7)
        return (other - (other @ gradient) / (gradient @ gradient) * gradient) * (1 + 0.1 * at) / 60


@pytest.mark.parametrize("fault", [Negated, Aside])
def test_a_short_gradient_has_not_the_references_direction_for_that(fault):
    found = diagnosed(fault)
    assert not found.causes, found
    assert not [said for said in found.certain if "the reference's direction" in said], found.certain


@pytest.mark.parametrize("fault", [Mixed, Clipped, Shuffled])
def test_a_direction_that_many_faults_give_or_none_names_no_cause(fault):
    assert diagnosed(fault).causes == ()


def test_gradients_of_another_direction_are_said_to_be_none_of_one_factor():
    said = " ".join(diagnosed(Mixed).certain)
    assert "another direction than the reference's" in said


def test_a_gradient_that_entered_smaller_is_said_to_be_so_without_a_cause():
    found = diagnosed(Clipped)
    assert any("0.7 times as large" in one for one in found.certain), found.certain
    assert set(found.classes) == {"clipping", "optimizer settings", "weights"}, "another LR scales momentum, too"


class HalfTheRate(Run):
    def rate(self, at):
        return RATES[at] / 2


@pytest.mark.parametrize("norm", [1.0, 1.0 + 1e-5])
def test_a_loss_that_is_off_beside_weights_may_be_logged_so_where_the_norm_is_the_same(norm):
    a, b = Run().trace(), HalfTheRate().trace()
    first = {"loss": 1.1 * b.steps[0].loss, "grad_norm": norm * b.steps[0].grad_norm}
    b = Trace(b.header, (b.steps[0].model_copy(update=first), *b.steps[1:]))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert not found.causes
    assert ({"schedule", "optimizer settings", "weights", "logging"} <= {*found.classes}) is (norm == 1.0)


@pytest.mark.parametrize("from_step", [1, 4])
def test_weights_that_are_apart_in_the_first_step_of_a_record_may_have_come_apart_before(from_step):
    class TwiceTheRate(Run):
        def rate(self, at):
            return (40 if at < from_step - 1 else 1) * RATES[at]

    traces = []
    for run in (Run, TwiceTheRate):
        steps = run().trace().steps[from_step - 1 :]
        losses = [it.loss * (1 + 0.1 * (run is not Run)) for it in steps]
        changed = [it.model_copy(update={"loss": loss}) for it, loss in zip(steps, losses, strict=True)]
        traces.append(Trace(run().trace().header, tuple(changed)))
    found = diagnose(*traces, compare(*traces, Tier.REASSOCIATED))
    assert "initial-weights" not in {cause.name for cause in found.causes}


def test_a_loss_of_the_other_sign_is_one_fault():
    class Negative(Run):
        def gradient(self, at, gradient):
            return -gradient

    a, b = Run().trace(), Negative().trace()
    b = Trace(b.header, tuple(it.model_copy(update={"loss": -it.loss}) for it in b.steps))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert "loss" in found.classes
    assert not {"schedule", "optimizer settings", "logging"} & {*found.classes}


class TenTimesTheRate(Run):
    def rate(self, at):
        return 10 * RATES[at]


@pytest.mark.parametrize(("fault", "first"), [(Decayed, {"base-lr", "reported-lr"}), (TenTimesTheRate, {"base-lr"})])
def test_weights_show_whether_the_logged_rate_was_used(fault, first):
    a, b = started(Run, START), started(fault, START)
    b = Trace(b.header, tuple(it.model_copy(update={"lr": (10 * it.lr[0],)}) for it in b.steps))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert {cause.name for cause in grouped(found.causes)[0]} >= first
    assert ("reported-lr" in {cause.name for cause in found.causes}) is ("reported-lr" in first)


def test_too_few_numbers_in_a_sketch_give_no_direction():
    """Any difference lies in a plane of two among two numbers."""

    def cut(trace):
        steps = [
            one.model_copy(update={"weights": one.weights.model_copy(update={"sketch": one.weights.sketch[:2]})})
            for one in trace.steps
        ]
        return Trace(trace.header, tuple(steps))

    a, b = cut(Run().trace()), cut(Mixed().trace())
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert found.causes == ()
    assert not any("another direction" in one for one in found.certain)


class WarmedUp(Run):
    """A warm-up from 0, of gradients that change with the weights; their own direction in every step."""

    rates = (0.0, 0.0125, 0.025, 0.0375, 0.05, 0.05)
    momentum = 0.0

    def rate(self, at):
        return self.rates[at]

    def trace(self):
        made = super().trace()
        steps = [it.model_copy(update={"lr": (self.rates[at],)}) for at, it in enumerate(made.steps)]
        return Trace(made.header, tuple(steps))


class WarmedUpLate(WarmedUp):
    """The learning rate is used one step late, and logged in time."""

    def rate(self, at):
        return self.rates[max(0, at - 1)]


class LostInWarmUp(WarmedUp):
    def after(self, at, weights, before):
        return before if at == 1 else weights


class LostWhole(LostInWarmUp):
    """The optimizer did not run at all: its momentum knows nothing of the gradient either."""

    def state(self, at, buffer):
        return buffer / self.momentum if at == 1 and self.momentum else buffer

    def entering(self, at, gradient):
        return 0 * gradient if at == 1 else gradient


def with_momentum(fault, momentum):
    return type(fault.__name__, (fault,), {"momentum": momentum})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("fault", [WarmedUpLate, LostInWarmUp, LostWhole])
def test_a_rate_used_one_step_late_in_a_warm_up_from_0_is_no_lost_update(fault, momentum):
    a, b = with_momentum(WarmedUp, momentum)().trace(), with_momentum(fault, momentum)().trace()
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    group = {cause.name for cause in grouped(found.causes)[0]}
    assert group == ({"lr-in-use"} if fault is WarmedUpLate else {"weights-of-the-step-before", "update-lost"}), found


@pytest.mark.parametrize("fault", [WarmedUpLate, LostInWarmUp])
def test_a_rate_used_one_step_late_is_named_where_other_weights_have_other_gradients(fault, monkeypatch):
    """The gradients of the candidate become longer than the reference's, by a tenth in the last step."""
    monkeypatch.setattr(WarmedUp, "gradient", lambda self, at, it: it * (1 + 0.02 * at * (type(self) is not WarmedUp)))
    a, b = WarmedUp().trace(), fault().trace()
    as_logged = [y.model_copy(update={"grad_norm": x.grad_norm}) for x, y in zip(a.steps, b.steps, strict=True)]
    b = Trace(b.header, tuple(as_logged))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    group = {cause.name for cause in grouped(found.causes)[0]}
    assert ("lr-in-use" in group) == (fault is WarmedUpLate), found
    assert ("update-lost" in group) == (fault is not WarmedUpLate), found


def test_the_class_of_a_named_cause_is_left_open():
    """A rate of 0 that was used in place of the logged one leaves no update, and so no direction of one."""
    a, b = WarmedUp().trace(), WarmedUpLate().trace()
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert {cause.name for cause in found.causes} == {"lr-in-use"}
    assert "schedule" in found.classes
