"""Without weights, losses and norms tell a wrong logged rate from one that was trained with, where it would show."""

import math

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import Diagnosis, diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace
from ds_parity.trace.foreign import open_pair

STEPS = 12
COUNTS = {"passes": 2, "idle_passes": 0, "rollouts": 12, "prompts": 3, "tokens": 900, "total": 900.0}


def cosine(step, peak=0.05):
    return peak * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def trained(rate=cosine, *, logged=None, dtype="fp32", loss=None):
    """A regression by SGD in fp64, on other rows in every step; `logged` makes what the trace says of a step's rate."""
    draw = np.random.default_rng(3)
    wanted, weights, steps = draw.normal(size=8), np.zeros(8), []
    for step in range(1, STEPS + 1):
        rows = draw.normal(size=(30, 8))
        off = rows @ (weights - wanted)
        gradient = 2 * rows.T @ off / len(rows)
        weights = weights - rate(step) * gradient
        figures = {
            "loss": float((off**2).mean()) if loss is None else loss,
            "grad_norm": float(np.linalg.norm(gradient)),
            "lr": ((logged or rate)(step),),
        }
        steps.append(StepRecord(step=step, **COUNTS, **figures))
    header = Header(
        scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="a", engine="loop", dtype=dtype,
        optimizer="SGD",
    )  # fmt: skip
    return Trace(header, tuple(steps))


def found(one: Trace, other: Trace, tier: Tier = Tier.REASSOCIATED, dtype: str = "fp32") -> Diagnosis:
    return diagnose(one, other, compare(one, other, tier, dtype))


def named(diagnosis: Diagnosis) -> list[set[str]]:
    return [{cause.name for cause in group} for group in grouped(diagnosis.causes)]


WRONG = {
    "twice": lambda step: 2 * cosine(step),
    "constant": lambda step: 0.05,
    "linear": lambda step: 0.05 * (1 - step / STEPS),
    "noise": lambda step: cosine(step) * (1 + 0.1 * math.sin(step**2)),
    "twice from the sixth step on": lambda step: cosine(step) * (2 if step > 5 else 1),
}


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("logged", WRONG.values(), ids=WRONG)
def test_a_wrong_logged_rate_is_named_where_it_would_have_moved_losses_and_norms(logged, tier):
    diagnosis = found(trained(), trained(logged=logged), tier)
    assert named(diagnosis) == [{"reported-lr"}]
    assert "loss, grad_norm agree" in diagnosis.causes[0].evidence
    assert diagnosis.classes == ("logging",)


@pytest.mark.parametrize("rate", WRONG.values(), ids=WRONG)
def test_a_rate_that_was_trained_with_is_no_wrong_log(rate):
    diagnosis = found(trained(), trained(rate))
    assert "reported-lr" not in {name for group in named(diagnosis) for name in group}
    assert "schedule" in diagnosis.classes


def test_a_log_that_is_a_step_off_is_no_other_schedule():
    assert named(found(trained(), trained(logged=lambda step: cosine(step + 1)))) == [{"lr-reported-a-step-off"}]


def begun(trace: Trace, steps: int = 2) -> Trace:
    """The first steps of a run."""
    return Trace(trace.header, trace.steps[:steps])


def of_two(step):
    """A schedule with two rates, of which the second begins with the third step."""
    return 0.05 if step < 3 else 0.005


@pytest.mark.parametrize(("rate", "steps"), [(cosine, 2), (of_two, 5)])
def test_of_two_rates_a_log_that_is_a_step_off_is_named_beside_any_other_wrong_log(rate, steps):
    sides = trained(rate), trained(rate, logged=lambda step: rate(step + 1))
    diagnosis = found(*(begun(side, steps) for side in sides))
    assert named(diagnosis) == [{"lr-reported-a-step-off", "reported-lr"}]


@pytest.mark.parametrize("rate", [lambda step: 2 * cosine(step), lambda step: 0.02])
def test_two_rates_that_no_other_step_has_are_logged_wrong_and_not_a_step_off(rate):
    (group,) = named(found(begun(trained()), begun(trained(logged=rate))))
    assert "reported-lr" in group
    assert "lr-reported-a-step-off" not in group


TINY = 1e-9
OPEN = {
    "rates that move losses by nothing that is recorded": {"rate": lambda step: TINY * cosine(step)},
    "a short type": {"dtype": "bf16"},
    "a type that is not recorded": {"dtype": None, "rate": lambda step: 0.1 * cosine(step)},
    "a loss that says nothing of weights": {"loss": 0.0},
}


@pytest.mark.parametrize("options", OPEN.values(), ids=OPEN)
def test_where_another_rate_may_not_show_both_are_named(options):
    rate = options.get("rate", cosine)
    one, other = trained(**options), trained(**options, logged=lambda step: 2 * rate(step))
    diagnosis = found(one, other, dtype=options.get("dtype") or "fp32")
    assert named(diagnosis) == [{"base-lr", "reported-lr"}]
    assert {"schedule", "logging"} <= set(diagnosis.classes)


@pytest.mark.parametrize("digits", [5, 17])
def test_figures_of_few_digits_prove_nothing(tmp_path, digits):
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, times in zip(paths, (1, 2), strict=True):
        line = f'{{{{"step": {{}}, "loss": {{:.{digits}g}}, "grad_norm": {{:.{digits}g}}, "lr": {{!r}}}}}}\n'
        rate = lambda step, times=times: 500 * times  # noqa: E731
        steps = trained(logged=rate).steps
        path.write_text("".join(line.format(it.step, it.loss, it.grad_norm, it.lr[0]) for it in steps))
    assert named(found(*open_pair(*paths))) == ([{"base-lr", "reported-lr"}] if digits == 5 else [{"reported-lr"}])


def test_a_rate_that_differs_in_the_last_step_alone_is_left_open():
    one = trained(lambda step: 0.05)
    other = trained(lambda step: 0.05, logged=lambda step: 0.1 if step == STEPS else 0.05)
    diagnosis = found(one, other)
    assert not diagnosis.causes
    assert {"schedule", "logging"} <= set(diagnosis.classes)


def test_one_parameter_group_of_several_may_hold_none_of_the_gradient():
    one = trained()
    sides = [
        Trace(one.header, tuple(it.model_copy(update={"lr": (*it.lr, times * it.lr[0])}) for it in one.steps))
        for times in (1, 2)
    ]
    assert named(found(*sides)) == [{"group-lr", "reported-lr"}]


@pytest.mark.parametrize("turn", [False, True])
def test_rates_that_are_rounded_to_fp32_are_called_so(turn):
    sides = trained(), trained(logged=lambda step: float(np.float32(cosine(step))))
    diagnosis = found(*(sides[::-1] if turn else sides))
    assert named(diagnosis) == [{"reported-lr", "lr-rounded"}]
    assert "agree to fp32" in diagnosis.causes[0].evidence
    # A rate that is off by little, and is no fp32 number, is another rate.
    assert "lr-rounded" not in named(found(trained(), trained(logged=lambda step: cosine(step) * (1 + 1e-5))))[0]


def clipped(rate, limit=0.1):
    """A policy gradient of five actions by SGD, whose gradients are all longer than the limit."""
    draw, weights, steps = np.random.default_rng(1), np.zeros((5, 8)), []
    for step in range(1, STEPS + 1):
        seen, taken, worth = draw.normal(size=(64, 8)) * 10, draw.integers(0, 5, 64), draw.normal(size=64)
        scores = np.exp(seen @ weights.T)
        chances = scores / scores.sum(1, keepdims=True)
        gradient = -((np.eye(5)[taken] - chances) * worth[:, None]).T @ seen / 64
        norm = float(np.linalg.norm(gradient))
        loss = float(-(worth * np.log(chances[np.arange(64), taken])).mean())
        weights = weights - rate * gradient * min(1, limit / norm)
        steps.append(StepRecord(step=step, **COUNTS, loss=loss, grad_norm=norm, lr=(rate,)))
    return Trace(trained().header, tuple(steps))


@pytest.mark.parametrize("limit", [0.1, 0.01])
@pytest.mark.parametrize("rate", [1e-5, 1e-4])
def test_a_rate_that_clipping_kept_from_showing_is_not_said_to_be_logged_wrong(rate, limit):
    said = named(found(clipped(rate, limit), clipped(2 * rate, limit)))
    assert said != [{"reported-lr"}]
    assert not said or any("base-lr" in group for group in said)


def test_rates_in_fp32_hide_nothing_else_that_differs():
    one, other = trained(), trained(logged=lambda step: float(np.float32(cosine(step))))
    steps = [step.model_copy(update={"grad_norm": step.grad_norm / 2}) for step in other.steps]
    halved = [step.model_copy(update={"grad_norm": step.grad_norm / 2}) for step in one.steps]
    as_logged, beside = found(one, Trace(other.header, tuple(steps))), found(one, Trace(one.header, tuple(halved)))
    assert (named(as_logged), as_logged.classes) == (named(beside), beside.classes)
    assert named(beside)
    assert "the learning rates agree to fp32, and are taken for equal" in as_logged.certain


@pytest.mark.parametrize("dtype", ["fp32", None])
@pytest.mark.parametrize("logged", [lambda step: cosine(step + 1), lambda step: cosine(step) / 2])
def test_a_rate_and_a_loss_that_are_logged_otherwise_are_no_other_training_where_norms_stay(logged, dtype):
    """Rates that take a loss apart take the gradient norms apart as well."""
    one, other = trained(dtype=dtype), trained(logged=logged, dtype=dtype)
    smooth, steps = other.steps[0].loss, []
    for step in other.steps:
        smooth = 0.7 * smooth + 0.3 * step.loss
        steps.append(step.model_copy(update={"loss": smooth}))
    groups = named(found(one, Trace(other.header, tuple(steps))))
    assert groups == [] or groups[0] & {"reported-lr", "lr-reported-a-step-off"}, groups
