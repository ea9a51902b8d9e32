"""What weights say of a gradient's length: nothing with most optimizers, and with SGD that always clips."""

from hashlib import sha256

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import Fit, diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace, Weights
from ds_parity.trace.records import Start

SIZE, STEPS = 400, 6
RNG = np.random.default_rng(1)
# Gradients of six lengths, each in a direction of its own.
LENGTHS = (1.0, 0.6, 1.7, 0.9, 1.3, 0.5)
GRADIENTS = [length * RNG.normal(size=SIZE) / SIZE**0.5 for length in LENGTHS]
SIGNS = RNG.choice([-1.0, 1.0], size=(32, SIZE))
START = RNG.normal(size=SIZE) * 20
TOKENS = (900, 1500, 700, 1100, 1300, 600)
RATE = 0.01


def adam(gradients, eps=1e-8):
    first, second, found = 0.0, 0.0, []
    for at, g in enumerate(gradients, 1):
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
        found.append(first / (1 - 0.9**at) / (np.sqrt(second / (1 - 0.95**at)) + eps))
    return found


def lamb(gradients):
    return [update / np.linalg.norm(update) for update in adam(gradients)]


def lion(gradients):
    kept, found = 0.0, []
    for g in gradients:
        found.append(np.sign(0.9 * kept + 0.1 * g))
        kept = 0.99 * kept + 0.01 * g
    return found


def adagrad(gradients):
    return [g / np.sqrt(sum(it * it for it in gradients[: at + 1])) for at, g in enumerate(gradients)]


def rmsprop(gradients):
    kept, found = 0.0, []
    for g in gradients:
        kept = 0.99 * kept + 0.01 * g * g
        found.append(g / (np.sqrt(kept) + 1e-8))
    return found


def sgd(gradients, *, momentum=0.9, nesterov=False):
    kept, found = 0.0, []
    for g in gradients:
        kept = momentum * kept + g
        found.append(g + momentum * kept if nesterov else kept)
    return found


def nesterov(gradients):
    return sgd(gradients, nesterov=True)


def clipped(gradients, limit):
    return [g * min(1.0, limit / np.linalg.norm(g)) for g in gradients]


def run(update=sgd, optimizer="SGD", *, scale=lambda at, g: g, logged=lambda at, norm: norm, rates=None, **options):
    """A run whose gradients are scaled, clipped at a limit and stepped, with weight decay beside them."""
    limit, decay, loss = options.get("limit", 1e9), options.get("decay", 0.0), options.get("loss", lambda at: 0.5 + at)
    gradients = [scale(at, g) for at, g in enumerate(GRADIENTS)]
    weights, steps = START.copy(), []
    for at, moved in enumerate(update([g + decay * START for g in clipped(gradients, limit)])):
        # The loss of other weights is another one.
        shown = loss(at) * (1 + 1e-9 * float(weights[0]))
        weights = weights - (rates or [RATE] * STEPS)[at] * moved
        norm = logged(at, float(np.linalg.norm(gradients[at])))
        summary = Weights(
            checksum=sha256(weights.astype(np.float32).tobytes()).hexdigest(),
            norm=float(np.linalg.norm(weights)),
            sketch=tuple((SIGNS @ weights).tolist()),
        )
        counts = {"passes": 4, "idle_passes": 0, "rollouts": 12, "prompts": 3, "tokens": TOKENS[at]}
        figures = {"total": float(TOKENS[at]), "loss": shown, "lr": (RATE,), "grad_norm": norm}
        steps.append(StepRecord(step=at + 1, **counts, **figures, weights=summary))
    start = Start(norm=float(np.linalg.norm(START)), sketch=tuple((SIGNS @ START).tolist()), dtype="fp32")
    header = Header(
        scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="a", engine="loop",
        optimizer=optimizer, start=start if options.get("told", True) else None,
    )  # fmt: skip
    return Trace(header, tuple(steps))


def found(a, b):
    return diagnose(a, b, compare(a, b, Tier.REASSOCIATED))


def times(factor):
    return lambda at, g: factor * g


BY_NO_FACTOR = {"reported-norm", "another-divisor", "constant-factor"}
FORGETFUL = {
    "AdamW": adam, "Lamb": lamb, "Lion": lion, "Adagrad": adagrad, "RMSprop": rmsprop, None: adam,
}  # fmt: skip


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("factor", [2.0, 0.5, 10.0])
@pytest.mark.parametrize("optimizer", FORGETFUL)
def test_a_factor_that_an_optimizer_forgets_is_named_beside_a_log_that_is_off(optimizer, factor, told):
    update = FORGETFUL[optimizer]
    one = run(update, optimizer, told=told)
    for other in ({"scale": times(factor)}, {"logged": lambda at, norm: factor * norm}):
        diagnosis = found(one, run(update, optimizer, told=told, **other))
        names = {cause.name for cause in grouped(diagnosis.causes)[0]}
        assert names == {"reported-norm", "dp-mean-left-in" if factor == 0.5 else "constant-factor"}
        assert diagnosis.causes[0].fit is Fit.CONSTANT
        assert {"gradient", "logging"} <= set(diagnosis.classes)
        assert not [said for said in diagnosis.certain if "direction" in said], diagnosis.certain


def test_a_factor_that_epsilon_shows_is_still_a_factor():
    """The weights differ then, and so no log alone is off."""

    def with_epsilon(gradients):
        return adam(gradients, eps=1e-3)

    diagnosis = found(run(with_epsilon, "Adam"), run(with_epsilon, "Adam", scale=times(0.5)))
    assert "weights" in diagnosis.certain[0]
    assert [cause.name for cause in diagnosis.causes] == ["dp-mean-left-in"]
    assert not [said for said in diagnosis.certain if "another direction" in said]


def test_a_divisor_of_each_step_is_named_beside_a_logged_loss_where_no_norm_tells():
    times = (0.5, 0.3, 0.7, 0.4, 0.6, 0.35)
    unknown = {"logged": lambda at, norm: None, "limit": 0.1}
    other = {"scale": lambda at, g: times[at] * g, "loss": lambda at: times[at] * (0.5 + at)}
    diagnosis = found(run(adam, "AdamW", **unknown), run(adam, "AdamW", **unknown, **other))
    assert {"reported-loss", "another-divisor"} <= {cause.name for cause in grouped(diagnosis.causes)[0]}


@pytest.mark.parametrize("factor", [2.0, 0.5, 10.0])
def test_sgd_that_clips_every_step_forgets_a_factor_too(factor):
    diagnosis = found(run(limit=0.2), run(limit=0.2, scale=times(factor)))
    names = {cause.name for cause in grouped(diagnosis.causes)[0]}
    assert names == {"reported-norm", "dp-mean-left-in" if factor == 0.5 else "constant-factor"}
    assert "SGD with clipping in every step" in diagnosis.causes[0].evidence


@pytest.mark.parametrize("update", [sgd, nesterov])
@pytest.mark.parametrize("limit", [1e9, 2.0])
def test_sgd_that_does_not_clip_shows_that_only_the_log_is_off(update, limit):
    diagnosis = found(run(update, limit=limit), run(update, limit=limit, logged=lambda at, norm: 0.1 * norm))
    assert (diagnosis.causes[0].name, diagnosis.causes[0].fit) == ("reported-norm", Fit.ALONE)
    assert diagnosis.classes == ("logging",)


def test_norms_that_follow_from_the_right_ones_are_logged_wrong_whatever_the_optimizer_forgets():
    late = [float(np.linalg.norm(GRADIENTS[max(0, at - 1)])) for at in range(STEPS)]
    for pattern in (lambda at, norm: norm**2, lambda at, norm: min(norm, 0.8), lambda at, norm: late[at]):
        diagnosis = found(run(adam, "AdamW"), run(adam, "AdamW", logged=pattern))
        assert [(cause.name, cause.fit) for cause in diagnosis.causes] == [("reported-norm", Fit.EVERY_STEP)]


@pytest.mark.parametrize("fault", ["scale", "logged"])
def test_a_limit_that_one_norm_alone_shows_is_as_well_a_factor(fault):
    """Every step is clipped, and the second window alone has two passes, by which a gradient or a log is divided."""
    long = {"limit": 0.1, "scale": lambda at, g: g * 4 if at else g, "logged": lambda at, norm: norm}
    halved = {**long, fault: lambda at, it: long[fault](at, it) / (2 if at else 1)}
    one, other = (
        Trace(it.header, tuple(step.model_copy(update={"passes": step.step}) for step in it.steps[:2]))
        for it in (run(**long), run(**halved))
    )
    (group,) = grouped(found(one, other).causes)
    assert {cause.name for cause in group} == {"gas-scaled-twice", "reported-norm"}
    assert "after clipping" not in group[0].evidence


def test_norms_that_are_off_by_no_one_factor_may_be_another_divisor():
    """Of gradients that are clipped in every step."""
    factors = (1.4, 2.3, 1.1, 3.1, 1.9, 2.7)
    clips = {"limit": 0.2}
    for other in ({"scale": lambda at, g: factors[at] * g}, {"logged": lambda at, norm: factors[at] * norm}):
        diagnosis = found(run(adam, "AdamW", **clips), run(adam, "AdamW", **clips, **other))
        assert {cause.name for cause in grouped(diagnosis.causes)[0]} == BY_NO_FACTOR
        assert diagnosis.causes[0].fit is Fit.PATTERN


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion", "Adagrad"])
def test_a_part_of_the_gradient_may_have_a_factor(optimizer):
    """Of a parameter group, say: it is no factor of the norm, and such optimizers forget it."""
    update, half = FORGETFUL[optimizer], np.where(np.arange(len(START)) % 2, 0.5, 1.0)
    diagnosis = found(run(update, optimizer), run(update, optimizer, scale=lambda at, g: half * g))
    assert {cause.name for cause in grouped(diagnosis.causes)[0]} == BY_NO_FACTOR


def test_a_loss_that_is_off_with_no_norm_beside_it_may_be_minimised():
    """As it is in a run that records no norms."""

    def without(trace):
        return Trace(trace.header, tuple(one.model_copy(update={"grad_norm": None}) for one in trace.steps))

    for optimizer, update, names in (
        ("AdamW", adam, {"reported-loss", "constant-factor"}),
        ("SGD", sgd, {"reported-loss"}),
    ):
        one, other = run(update, optimizer), run(update, optimizer, loss=lambda at: 2 * (0.5 + at))
        diagnosis = found(one, other)
        assert {cause.name for cause in grouped(diagnosis.causes)[0]} == {"reported-loss"}
        diagnosis = found(without(one), without(other))
        assert {cause.name for cause in grouped(diagnosis.causes)[0]} >= names - {"constant-factor"}
        assert optimizer == "SGD" or "constant-factor" in {cause.name for cause in diagnosis.causes}


@pytest.mark.parametrize("options", [{}, {"decay": 0.01}, {"update": nesterov}, {"update": nesterov, "decay": 0.01}])
@pytest.mark.parametrize("told", [True, False])
def test_sgd_with_decay_or_nesterovs_momentum_gives_a_factor_no_other_direction(options, told):
    """Both mix something else than the gradient into the updates."""
    for first in (0, 1, 3):
        scale = {"scale": lambda at, g, first=first: (1.0 if at < first else 1.3) * g}
        diagnosis = found(run(told=told, **options), run(told=told, **options, **scale))
        assert diagnosis.certain
        assert not [said for said in diagnosis.certain if "another direction" in said], (first, diagnosis.certain)


def test_another_direction_is_told_of_sgd_alone():
    """By the headers: what a trace does not name is not taken for SGD."""
    turned = {"scale": lambda at, g: g + 0.5 * np.roll(g, 7)}
    assert any("another direction" in said for said in found(run(), run(**turned)).certain)
    diagnosis = found(run(optimizer=None), run(optimizer=None, **turned))
    assert not any("direction" in said for said in diagnosis.certain)


def test_a_rate_that_adam_used_once_is_not_told_of_the_gradient():
    rates = [RATE, 1.1 * RATE, *[RATE] * 4]
    diagnosis = found(run(adam, "AdamW"), run(adam, "AdamW", rates=rates))
    assert "weights" in diagnosis.certain[0]
    assert not any("gradient entered" in said for said in diagnosis.certain), diagnosis.certain


@pytest.mark.parametrize(("optimizer", "update"), [("AdamW", adam), ("SGD", sgd)])
def test_a_norm_that_is_hardly_off_is_not_proved_wrong_by_a_loss_that_is_far_off(optimizer, update):
    """A loss in bf16 rounds each gradient by 0.2 %, its own value by more where it is near 0, and weights hardly."""
    rounded = {"scale": lambda at, g: (1.0 + 0.002 * (-1) ** at) * g, "loss": lambda at: 1.1 * (0.5 + at)}
    diagnosis = found(run(update, optimizer), run(update, optimizer, **rounded))
    assert {"loss", "gradient"} <= set(diagnosis.classes), diagnosis


def test_a_learning_rate_that_is_logged_wrong_is_so_where_lengths_are_forgotten_too():
    other = run(adam, "AdamW", logged=lambda at, norm: 2 * norm)
    other = Trace(other.header, tuple(one.model_copy(update={"lr": (2 * RATE,)}) for one in other.steps))
    diagnosis = found(run(adam, "AdamW"), other)
    assert {cause.name for cause in diagnosis.causes} == {"reported-lr"}


def test_norms_that_a_small_term_of_the_loss_leaves_are_no_wrong_log():
    """Lion keeps the signs of gradients, and shows no term that turns few of them."""
    one = run(lion, "Lion")
    for far, named in ((1e-3, set()), (0.2, BY_NO_FACTOR)):
        diagnosis = found(one, run(lion, "Lion", logged=lambda at, norm, far=far: norm * (1 + far * (at % 3) / 2)))
        assert {cause.name for cause in diagnosis.causes} == named
        assert {"gradient", "loss", "logging"} <= set(diagnosis.classes)
