"""A wrong logged rate, and another fault that begins later: the steps between them show what was trained with."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.parity.diagnosis.effects import step_lengths
from ds_parity.trace import Header, Start, StepRecord, Trace, Weights

STEPS, LATER = 16, 10
COUNTS = {"passes": 2, "idle_passes": 0, "rollouts": 12, "prompts": 3, "tokens": 900, "total": 900.0}


def cosine(step, peak=0.05):
    return peak * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def exponential(step):
    return 0.05 * 0.5**step


def trained(
    rate=cosine, *, logged=None, weights=False, others=STEPS + 1, skipped=(), limit=math.inf, momentum=0.0, start=None
):
    """A regression by SGD in fp64, on other rows in every step; checksums are of weights in fp32.

    Args:
        rate: of a step.
        logged: what the trace says of it; None: the rate itself.
        weights: the trace holds them.
        others: the first step that is of rows which the other runs do not have.
        skipped: steps that are not taken.
        limit: to which gradients are clipped.
        momentum: of SGD.
        start: what the header says of the weights before the first step, which are 0.
    """
    draw, of_others = np.random.default_rng(3), np.random.default_rng(4)
    wanted, now, buffer, steps = draw.normal(size=12), np.zeros(12), np.zeros(12), []
    for step in range(1, STEPS + 1):
        rows = draw.normal(size=(30, 12))
        rows = of_others.normal(size=(30, 12)) if step >= others else rows
        off = rows @ (now - wanted)
        gradient = 2 * rows.T @ off / len(rows)
        buffer = momentum * buffer + gradient * min(1.0, limit / float(np.linalg.norm(gradient)))
        now = now if step in skipped else now - rate(step) * buffer
        figures = {
            "loss": float((off**2).mean()),
            "grad_norm": float(np.linalg.norm(gradient)),
            "lr": ((logged or rate)(step),),
        }
        checksum = hashlib.sha256(now.astype(np.float32).tobytes()).hexdigest()
        kept = Weights(checksum=checksum, norm=float(np.linalg.norm(now)), sketch=tuple(now))
        if step in skipped:
            figures |= {"grad_norm": None, "skipped": True}
        steps.append(StepRecord(step=step, **COUNTS, **figures, weights=kept if weights else None))
    header = Header(
        scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="a", engine="loop", dtype="fp32",
        optimizer="SGD", start=start,
    )  # fmt: skip
    return Trace(header, tuple(steps))


def named(one, other):
    diagnosis = diagnose(one, other, compare(one, other, Tier.REASSOCIATED))
    return [{cause.name for cause in group} for group in grouped(diagnosis.causes)], diagnosis


WRONG = {
    "twice": (lambda step: 2 * cosine(step), "reported-lr"),
    "constant": (lambda step: 0.05, "reported-lr"),
    "rounded": (lambda step: round(cosine(step), 2), "reported-lr"),
    "of the next step": (lambda step: cosine(step + 1), "lr-reported-a-step-off"),
    "of the step before": (lambda step: cosine(max(1, step - 1)), "lr-reported-a-step-off"),
}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("logged", "right"), WRONG.values(), ids=WRONG)
def test_a_rate_that_was_not_trained_with_up_to_a_second_fault_is_logged_wrong(logged, right, weights):
    groups, diagnosis = named(trained(weights=weights), trained(logged=logged, weights=weights, others=LATER))
    assert groups == [{right}]
    assert f"agree up to step {LATER - 1}" in diagnosis.causes[0].evidence
    assert "second fault" in diagnosis.causes[0].evidence


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("rate", "name"), WRONG.values(), ids=WRONG)
def test_a_rate_that_was_trained_with_is_no_wrong_log_whatever_else_comes_later(rate, name, weights):
    groups, _ = named(trained(weights=weights), trained(rate, weights=weights, others=LATER))
    assert not {"reported-lr", name} & set().union(*groups)


def tiny(rate):
    return lambda step: 1e-7 * rate(step)


def test_rates_too_small_to_show_are_named_beside_a_wrong_log_where_a_loss_parts_at_once():
    """No rate moves a loss by nothing for many steps, and then by a half in one."""
    one, other = trained(tiny(cosine)), trained(tiny(cosine), logged=tiny(WRONG["of the next step"][0]), others=LATER)
    groups, diagnosis = named(one, other)
    assert groups == [{"schedule-off-by-steps", "reported-lr"}]
    assert f"in step {LATER} its loss parts at once" in diagnosis.causes[0].evidence


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("share", [3e-6, 1e-5])
def test_rates_that_take_a_loss_apart_from_step_to_step_need_no_second_fault(share, weights):
    """The bounds of losses and norms let many steps pass."""
    groups, _ = named(trained(weights=weights), trained(lambda step: (1 + share) * cosine(step), weights=weights))
    assert "base-lr" in groups[0]
    assert "reported-lr" not in groups[0]


def test_a_factor_and_a_step_may_be_logged_alike():
    twice = trained(exponential, logged=lambda step: exponential(max(1, step - 1)), others=LATER)
    assert named(trained(exponential), twice)[0] == [{"lr-reported-a-step-off", "reported-lr"}]


def test_a_group_that_holds_none_of_the_gradient_may_have_another_rate():
    """Weights and losses that agree don't show it."""
    one, other = trained(weights=True), trained(weights=True, others=LATER)
    sides = [
        Trace(side.header, tuple(it.model_copy(update={"lr": (*it.lr, times * it.lr[0])}) for it in side.steps))
        for side, times in ((one, 1), (other, 2))
    ]
    assert any("group-lr" in group for group in named(*sides)[0])


def test_a_wrong_log_is_shown_in_as_many_digits_as_tell_it():
    groups, diagnosis = named(trained(weights=True), trained(logged=lambda step: cosine(step) + 1e-7, weights=True))
    assert groups == [{"reported-lr"}]
    assert "(0.0495197, where 0.0495196 was due)" in diagnosis.causes[0].evidence


@pytest.mark.parametrize(("first", "length"), [(0.0, 0.0), (0.01, 0.05), (0.05, 0.25), (0.4, 0.5), (None, 0.5)])
def test_a_first_step_from_a_start_that_is_not_known_is_as_long_as_its_rate_says(first, length):
    """A warm-up begins at 0: a tiny rate in its place moves weights by little, and no proof rests on it."""
    steps = []
    for at, (place, rate) in enumerate(((1.0, first), (2.0, 0.1), (3.0, 0.05), (5.0, 0.1))):
        kept = Weights(checksum="a" * 64, norm=1.0, sketch=(place, *[0.0] * 11))
        lr = None if rate is None else (rate,)
        steps.append(StepRecord(step=at + 1, **COUNTS, loss=1.0, grad_norm=1.0, lr=lr, weights=kept))
    one = Trace(trained().header, tuple(steps))
    lengths = step_lengths(one, list(zip(steps, steps, strict=True)))
    assert lengths is not None
    assert lengths[0] == pytest.approx(length)


def ahead(step):
    """One step ahead from step 6 on."""
    return cosine(step + (step >= 6))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("skipped", [(), (6,), (6, 7)])
def test_a_step_that_was_skipped_proves_no_rate(skipped, weights):
    """Its weights agree whatever its rate was to be."""
    groups, _ = named(*(trained(rate, weights=weights, skipped=skipped) for rate in (cosine, ahead)))
    assert groups == [{"schedule-off-by-steps"}]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("rate", "right"), [(ahead, "schedule-off-by-steps"), (lambda step: cosine(min(step, 6)), None)]
)
def test_a_log_of_the_rates_that_the_next_steps_use_hides_no_fault_of_the_schedule(rate, right, weights):
    """transformers' Trainer logs so: the step that says another rate has not used it yet, and proves nothing of it."""
    one, other = (trained(it, logged=lambda n, it=it: it(n + 1), weights=weights) for it in (cosine, rate))
    groups, diagnosis = named(one, other)
    first = groups[0] if groups else set()
    assert first != {"reported-lr"}, diagnosis
    assert right in first or right is None


AT_ZERO = Start(norm=0.0, sketch=(0.0,) * 12, dtype="fp32")


def warmed(step):
    return 0.02 * min(step - 1, STEPS - step) / STEPS


def slowly(step):
    return 0.05 * 0.97**step


def in_two_groups(trace):
    """The same run with twice the rate for a second parameter group, which is logged beside the first one's."""
    return replace(trace, steps=tuple(it.model_copy(update={"lr": (*it.lr, 2 * it.lr[0])}) for it in trace.steps))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("rate", [slowly, warmed, cosine])
@pytest.mark.parametrize("limit", [1.7, 0.6, 1.02])
def test_a_rate_of_the_next_step_beside_another_clip_may_be_logged_wrong(rate, limit, several):
    """The first update is not so many times as long as the rates have it, be it by little; a rate of 0 moves none."""
    one = trained(rate, weights=True, limit=1.0, start=AT_ZERO)
    other = trained(rate, logged=lambda step: rate(step + 1), weights=True, limit=limit, start=AT_ZERO)
    groups, diagnosis = named(*map(in_two_groups, (one, other)) if several else (one, other))
    assert groups[0] >= {"schedule-off-by-steps", "reported-lr"}
    assert "beside a second fault: the weights of step 1 " in diagnosis.causes[0].evidence


@pytest.mark.parametrize("rate", [slowly, cosine])
@pytest.mark.parametrize(("momentum", "logged_wrong"), [(0.5, True), (0.9, False)])
def test_equal_weights_behind_the_first_step_show_a_wrong_log_beside_another_momentum(rate, momentum, logged_wrong):
    """Momentum enters in the second step, so that the first one has the update of the rates that were used."""
    one = trained(rate, weights=True, momentum=0.9)
    shown = {"logged": lambda step: rate(step + 1)} if logged_wrong else {}
    other = trained(rate if shown else lambda step: rate(step + 1), weights=True, momentum=momentum, **shown)
    groups, _ = named(one, other)
    assert "schedule-off-by-steps" in groups[0]
    assert ("reported-lr" in groups[0]) == logged_wrong


def behind_no_gradient(trace):
    """The same run with a first step whose micro-batches have no gradient, such as those of equal advantages."""
    first, *others = trace.steps
    return replace(trace, steps=(first.model_copy(update={"grad_norm": 0.0, "skipped": False}), *others))


@pytest.mark.parametrize("rate", [slowly, cosine])
def test_equal_weights_behind_a_step_without_a_gradient_show_no_wrong_log(rate):
    one, other = (trained(it, weights=True, skipped=(1,)) for it in (rate, lambda step: rate(step + 1)))
    groups, _ = named(behind_no_gradient(one), behind_no_gradient(other))
    assert "schedule-off-by-steps" in groups[0]
    assert "reported-lr" not in groups[0]


def test_equal_weights_show_no_wrong_log_where_a_rate_differs_by_its_last_digit():
    """The schedule is half as long, and its first rate is computed in another order."""

    def half(step):
        return cosine(min(STEPS, 2 * step - 2)) if step > 1 else math.nextafter(cosine(0), 1.0)

    groups, _ = named(trained(lambda step: cosine(step - 1), weights=True), trained(half, weights=True))
    assert "schedule-too-short" in groups[0]
    assert "reported-lr" not in groups[0]


@pytest.mark.parametrize("rate", [slowly, warmed, cosine])
@pytest.mark.parametrize("limit", [1.0, math.inf])
def test_a_rate_of_the_next_step_that_was_trained_with_needs_no_second_fault(rate, limit):
    one = trained(rate, weights=True, limit=limit, start=AT_ZERO)
    groups, _ = named(one, trained(lambda step: rate(step + 1), weights=True, limit=limit, start=AT_ZERO))
    assert "schedule-off-by-steps" in groups[0]
    assert "reported-lr" not in groups[0]


@pytest.mark.parametrize("weights", [False, True])
def test_a_rate_of_the_last_step_that_nothing_else_gives_is_logged_wrong(weights):
    groups, _ = named(
        trained(lambda step: 0.05, weights=weights),
        trained(lambda step: 0.05, logged=lambda step: 0.05 * (2 if step == STEPS else 1), weights=weights),
    )
    assert groups == ([{"reported-lr"}] if weights else [])


def peaked(step):
    """A warm-up and a line down to the first rate, which stays."""
    return 0.01 * (step if step < 5 else max(1, 8 - step))


@pytest.mark.parametrize("dtype", ["fp32", None])
def test_rates_that_were_off_and_back_would_have_shown_between(dtype):
    """Logs of the next step's rate add up to nothing where a schedule is back at its first rate."""
    pair = (trained(peaked), trained(peaked, logged=lambda step: peaked(step + 1), others=LATER))
    one, other = (Trace(it.header.model_copy(update={"dtype": dtype}), it.steps) for it in pair)
    groups, _ = named(one, other)
    assert groups[0] & {"reported-lr", "lr-reported-a-step-off"}, groups


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Lion"])
@pytest.mark.parametrize("since", [1, LATER])
def test_gradients_at_a_rate_of_0_are_not_shown_by_weights(optimizer, since):
    """Weights that nothing moves are alike whatever the gradient is: the log of its norm is not proved wrong."""

    def rate(step):
        return 0.0 if (step == 1 if since == 1 else step >= since) else 0.02

    one = trained(rate, weights=True)
    one = Trace(one.header.model_copy(update={"optimizer": optimizer}), one.steps)
    factors = {1: [0.5], LATER: [0.5, 0.7, 0.4, 0.6, 0.3, 0.8, 0.5]}[since]
    steps = [
        it.model_copy(update={"grad_norm": it.grad_norm * factors[it.step - since]})
        if 0 <= it.step - since < len(factors)
        else it
        for it in one.steps
    ]
    groups, diagnosis = named(one, Trace(one.header, tuple(steps)))
    assert not {"reported-norm", "another-divisor"} & set().union(*groups), groups
    assert {"gradient", "logging"} <= set(diagnosis.classes)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("at", [1, STEPS])
@pytest.mark.parametrize(
    ("field", "value", "name"), [("tokens", 1800, "reported-counts"), ("loss", 90.0, "reported-loss")]
)
def test_a_step_at_a_rate_of_0_that_is_logged_otherwise_is_named_by_norms(field, value, name, at, weights):
    """Weights say nothing of it, and take nothing away from what losses and norms show."""
    one = trained(lambda step: 0.0 if step == at else 0.02, weights=weights)
    steps = [it.model_copy(update={field: value} if it.step == at else {}) for it in one.steps]
    groups, _ = named(one, Trace(one.header, tuple(steps)))
    assert name in groups[0], groups


@pytest.mark.parametrize(("steps", "left"), [(2, False), (3, True)])
def test_losses_that_are_equal_in_every_digit_leave_a_wrong_log_open(steps, left):
    """A second fault that hardly shows is none of the rates, if these show nothing in some steps."""
    one = trained(cosine)
    late = {it.step: 1 + (5e-6 if it.step > steps + 1 else 0.0) for it in one.steps}
    changed = [
        it.model_copy(
            update={
                "lr": (cosine(it.step + 1),), "loss": it.loss * late[it.step], "grad_norm": it.grad_norm * late[it.step]
            }
        )
        for it in one.steps
    ]  # fmt: skip
    pair = (one, Trace(one.header, tuple(changed)))
    groups, _ = named(*(Trace(it.header.model_copy(update={"dtype": None}), it.steps) for it in pair))
    assert ("reported-lr" in groups[0]) is left, groups


@pytest.mark.parametrize("idle", [None, 5])
@pytest.mark.parametrize("since", [1, 4])
@pytest.mark.parametrize(("factor", "dtype"), [(0.5, "fp32"), (4.0, "fp32"), (0.2, "bf16")])
def test_gradients_that_rates_make_up_for_are_no_wrong_log_of_the_rate_alone(factor, since, idle, dtype):
    """SGD takes the same steps with gradients twice as long at half the rate; a window may have no gradient."""
    one = trained(cosine, weights=True)
    none = {"grad_norm": 0.0}
    steps, others = [], []
    for it in one.steps:
        rests = it.model_copy(update=none if it.step == idle else {})
        rounded = 1 + 2e-3 * (it.step % 2) if dtype == "bf16" else 1.0  # as gradients in bf16 are
        made_up = {"lr": (it.lr[0] / factor,), "grad_norm": rests.grad_norm * factor * rounded}
        steps.append(rests)
        others.append(rests.model_copy(update=made_up if it.step >= since else {}))
    header = one.header.model_copy(update={"dtype": dtype})
    pair = Trace(header, tuple(steps)), Trace(header, tuple(others))
    diagnosis = diagnose(*pair, compare(*pair, Tier.REASSOCIATED, dtype))
    assert [cause.name for cause in diagnosis.causes] != ["reported-lr"]
    assert {"gradient", "schedule"} <= set(diagnosis.classes)
