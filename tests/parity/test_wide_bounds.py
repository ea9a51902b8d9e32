"""Where a bound is wide, a loss that agrees excludes neither another loss nor other data."""

import math

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Trace
from ds_parity.trace.digits import Precision
from ds_parity.trace.records import Start
from tests.parity.test_forgotten_lengths import RATE, RNG, SIGNS, SIZE, START, STEPS, adam, run

# What is left of each gradient after another 0.4 of its length is added at a right angle to it.
ASIDE = RNG.normal(size=SIZE)
ADAM = {"update": adam, "optimizer": "AdamW"}
OPTIMIZERS = {"AdamW": ADAM, "SGD": {}}
# Updates that bf16 rounds visibly beside the weights themselves.
FAST = [100 * RATE] * STEPS


def turned(at, gradient):
    """A gradient of the same length in another direction."""
    aside = ASIDE - (ASIDE @ gradient) / (gradient @ gradient) * gradient
    found = gradient + 0.4 * np.linalg.norm(gradient) / np.linalg.norm(aside) * aside
    return found * np.linalg.norm(gradient) / np.linalg.norm(found)


def of(dtype, one, other):
    return diagnose(one, other, compare(one, other, Tier.REASSOCIATED, dtype))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_that_turned_may_be_that_of_another_loss_or_of_other_data(optimizer):
    """In bf16 alone: in fp32 a loss that agrees is the right one."""
    options = OPTIMIZERS[optimizer]
    one, other = run(**options, rates=FAST), run(**options, rates=FAST, scale=turned)
    half, full = of("bf16", one, other), of("fp32", one, other)
    assert {"data", "loss", "gradient"} <= set(half.classes)
    assert {"data", "loss", "gradient"} <= set(of("fp16", one, other).classes)
    assert half.certain[0].startswith("first to differ, in step 1: weights")
    assert not {"data", "loss"} & set(full.classes)
    assert not half.causes


def test_a_gradient_that_turned_is_no_other_learning_rate():
    """SGD's gradients are rounded by far less than this one turned; of Adam's updates that is not known."""
    one, other = run(rates=FAST), run(rates=FAST, scale=turned)
    diagnosis = of("bf16", one, other)
    assert "schedule" not in diagnosis.classes
    assert not {"lr-in-use", "update-lost"} & set(diagnosis.not_excluded)
    longer = of("bf16", one, run(rates=[3 * it for it in FAST]))
    assert "schedule" in longer.classes


def test_a_norm_that_is_off_may_be_of_other_data_where_its_loss_is_known_roughly():
    one, other = run(rates=FAST), run(rates=FAST, scale=lambda at, g: 1.3 * turned(at, g))
    assert "data" in of("bf16", one, other).classes
    assert "data" not in of("fp32", one, other).classes


@pytest.mark.parametrize("digits", [2, None])
def test_a_loss_of_few_digits_says_as_little(digits):
    """One that was written with all of its digits says that the loss and the data are right."""
    rounded = [
        Trace(it.header, it.steps, {} if digits is None else {"loss": Precision(decimals=2)})
        for it in (run(rates=FAST), run(rates=FAST, scale=turned))
    ]
    assert ({"data", "loss"} <= set(of("fp32", *rounded).classes)) == (digits is not None)


def test_another_start_is_named_though_the_first_loss_agrees():
    one = run(rates=FAST)
    moved = START + 0.3 * RNG.normal(size=SIZE) * np.linalg.norm(START) / SIZE**0.5
    shift = SIGNS @ (moved - START)
    steps = [
        it.model_copy(update={"weights": elsewhere(it.weights, shift), "loss": it.loss * 1.001}) for it in one.steps
    ]
    start = Start(norm=float(np.linalg.norm(moved)), sketch=tuple((SIGNS @ moved).tolist()), dtype="fp32")
    other = Trace(one.header.model_copy(update={"start": start}), tuple(steps))
    assert [cause.name for cause in of("bf16", one, other).causes] == ["initial-weights"]
    # A start that lies a rounding away explains no gradient that turned.
    near = Start(norm=start.norm, sketch=tuple((SIGNS @ START * (1 + 1e-7)).tolist()), dtype="fp32")
    wrong = run(rates=FAST, scale=turned)
    wrong = Trace(wrong.header.model_copy(update={"start": near}), wrong.steps)
    assert not of("bf16", one, wrong).causes


def elsewhere(weights, shift):
    sketch = np.array(weights.sketch) + shift
    return weights.model_copy(update={"sketch": tuple(sketch.tolist()), "checksum": weights.checksum[::-1]})


def test_a_loss_of_another_value_and_the_same_gradient_is_named_beside_a_log_that_is_off():
    """A constant in it, or a ratio that is always one: the log may be right, and the function another."""
    one = run()
    for dtype, loss in (("fp32", lambda at: 0.9 + at), ("bf16", lambda at: 0.17 * (0.5 + at) + 0.004 * (-1) ** at)):
        diagnosis = of(dtype, one, run(loss=loss))
        names = {cause.name for cause in grouped(diagnosis.causes)[0]}
        assert names == {"reported-loss", "metrics-mean-of-ranks", "loss-with-this-gradient"}, names
        assert diagnosis.classes == ("loss", "logging")
    said = diagnosis.causes[0].evidence
    assert "the logged loss is about 0.169 times the reference's in every step, within rounding" in said
    (cause,) = of("fp32", one, run(loss=lambda at: 0.17 * (0.5 + at))).causes
    assert cause.name == "reported-loss"


def test_a_rate_that_is_off_where_it_is_small_is_not_proved_a_wrong_log():
    """In bf16 the weights are too near to tell; the same numbers, only logged, are no proof either."""
    rates = [100 * RATE * it for it in (1.0, 1.0, 1.0, 1.0, 0.1, 0.1)]
    others = [*rates[:-2], *(1.1 * it for it in rates[-2:])]
    one, trained = (logging(run(rates=it), it) for it in (rates, others))
    diagnosis = of("bf16", one, trained)
    assert "schedule" in diagnosis.classes
    assert "reported-lr" not in {cause.name for cause in diagnosis.causes}
    wrong = logging(run(rates=rates), [2 * it for it in rates])
    assert [cause.name for cause in of("bf16", one, wrong).causes] == ["reported-lr"]


def test_counts_that_are_off_by_little_are_not_proved_a_wrong_log():
    """Another mask takes a few tokens from each rollout, and turns the gradient by less than bf16 lets pass."""
    one, other = run(rates=FAST), run(rates=FAST, scale=lambda at, g: g + 0.05 * (turned(at, g) - g))
    fewer = logging(other, None, tokens=lambda count: round(0.995 * count))
    diagnosis = of("bf16", one, fewer)
    assert "data" in diagnosis.classes
    assert not diagnosis.causes
    # Nothing else differs at all: what was trained with is the same.
    (cause,) = of("bf16", one, logging(one, None, tokens=lambda count: round(0.995 * count))).causes
    assert cause.name == "reported-counts"


def logging(trace, rates, tokens=lambda count: count):
    steps = [
        it.model_copy(update={"lr": it.lr if rates is None else (rates[at],), "tokens": tokens(it.tokens)})
        for at, it in enumerate(trace.steps)
    ]
    return Trace(trace.header, tuple(steps))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 3])
def test_an_update_of_nothing_has_no_direction(optimizer, at, dtype):
    """The logged rate of a step is 0, as at the start of a warm-up, and the rate in use is not."""
    options, rates = OPTIMIZERS[optimizer], list(FAST)
    rates[at] = 0.0
    one, other = (logging(run(**options, rates=it), rates) for it in (rates, FAST))
    diagnosis = of(dtype, one, other)
    assert "schedule" in diagnosis.classes or diagnosis.causes
    assert diagnosis.causes or "lr-in-use" in diagnosis.not_excluded


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_number_that_is_logged_as_nan_is_a_wrong_log_where_weights_agree(dtype):
    one = run()
    lost = [it.model_copy(update={"loss": math.nan}) for it in one.steps]
    assert "reported-loss" in {cause.name for cause in of(dtype, one, Trace(one.header, tuple(lost))).causes}
    assert [cause.name for cause in of(dtype, one, logging(one, [math.nan] * STEPS)).causes] == ["reported-lr"]


def test_a_loss_that_is_exactly_one_multiple_is_said_to_be_so_in_bf16():
    one = run()
    four = [it.model_copy(update={"loss": 4 * it.loss, "passes": 3}) for it in one.steps]
    same = Trace(one.header, tuple(it.model_copy(update={"passes": 3}) for it in one.steps))
    diagnosis = of("bf16", same, Trace(one.header, tuple(four)))
    assert [cause.name for cause in diagnosis.causes] == ["reported-loss"]
    assert "the logged loss is 4 times the reference's in every step" in diagnosis.causes[0].evidence
    assert diagnosis.classes == ("logging",)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_norm_that_passes_as_far_apart_as_the_loss_proves_no_wrong_log(scaled):
    """SGD that clips every step forgets that a loss was scaled, and the bound of bf16 hides it in the norm."""

    def late(at):
        return 1.055 if at == STEPS - 1 else 1.0

    one = run(limit=0.1)
    gradients = {"scale": lambda at, g: late(at) * g} if scaled else {}
    diagnosis = of("bf16", one, run(limit=0.1, loss=lambda at: late(at) * (0.5 + at), **gradients))
    assert {cause.name for cause in diagnosis.causes} == (set() if scaled else LOGGED)
    assert ("gradient" in diagnosis.classes) is scaled


LOGGED = {"reported-loss", "metrics-mean-of-ranks", "loss-with-this-gradient"}


@pytest.mark.parametrize("crept", [True, False])
def test_weights_that_came_apart_within_their_bound_leave_the_update_open_where_a_mean_differs(crept):
    used = {"rates": [1.005 * RATE] * STEPS} if crept else {}
    one, other = run(**ADAM), run(**ADAM, **used, loss=lambda at: (1 + 4e-6) * (0.5 + at))
    found = compare(one, other, Tier.REASSOCIATED)
    assert [it.name for it in found.found] == ["loss, mean"]
    of_update = {"clipping", "optimizer settings", "schedule", "weights"}
    assert (of_update <= {*diagnose(one, other, found).classes}) is crept
