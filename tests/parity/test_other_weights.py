"""Gradients that are off by a factor, and from the second step on by what their other weights have made of them."""

from hashlib import sha256

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, Trace, Weights
from ds_parity.trace.records import Start
from tests.parity.test_diagnosis_of_weights import RATES, SIGNS, START, STEPS, record

SIZE = len(START)
RNG = np.random.default_rng(3)
# What all gradients have in common: weights that move along it meet a shorter one.
TARGETS = RNG.normal(size=SIZE) + 0.7 * RNG.normal(size=(STEPS, SIZE))
# Slopes that differ between directions, and one that all of them have.
DIRECTIONS = np.linalg.qr(RNG.normal(size=(SIZE, 200)))[0]
UNEVEN, EVEN = (DIRECTIONS * np.linspace(0, 20, 200)) @ DIRECTIONS.T, 12 * np.eye(SIZE)


def trace(factors, *, slopes=UNEVEN, momentum=0.0, steps=STEPS):
    """A run of SGD in a bowl of some slopes, whose gradients are off by a factor in each step."""
    weights, buffer, records = START.copy(), np.zeros(SIZE), []
    for at, factor in zip(range(steps), factors, strict=False):
        gradient = factor * (TARGETS[at] + slopes @ (weights - START))
        buffer = momentum * buffer + gradient
        weights = weights - RATES[at] * buffer
        records.append(record(at + 1, np.linalg.norm(gradient), weights))
    start = Start(norm=float(np.linalg.norm(START)), sketch=tuple((SIGNS @ START).tolist()), dtype="fp32")
    header = Header(
        scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="a", engine="loop", optimizer="SGD",
        start=start,
    )  # fmt: skip
    return Trace(header, tuple(records))


def named(factors, counts=(), **options):
    a, b = trace([1.0] * STEPS, **options), trace(factors, **options)
    if counts:
        a, b = (
            Trace(it.header, tuple(one.model_copy(update=of) for one, of in zip(it.steps, counts, strict=True)))
            for it in (a, b)
        )
    causes = diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes
    assert len(grouped(causes)) == 1
    ratios = [y.grad_norm / x.grad_norm for x, y in zip(a.steps, b.steps, strict=True)]
    return {cause.name for cause in causes}, ratios


@pytest.mark.parametrize("factor", [0.9, 0.98, 0.3, 2.0, 3.0])
@pytest.mark.parametrize("slopes", [UNEVEN, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_factor_that_all_steps_have_is_named_where_other_weights_have_other_gradients(factor, slopes, momentum):
    """The first step alone starts from the same weights."""
    names, ratios = named([factor] * STEPS, slopes=slopes, momentum=momentum)
    assert max(abs(it - factor) for it in ratios) > 0.05 * min(1, factor, abs(factor - 1)), "norms tell it alone"
    assert names == {"constant-factor", "another-divisor"}


@pytest.mark.parametrize(("factor", "name"), [(0.5, "dp-mean-left-in"), (0.25, "gas-scaled-twice")])
@pytest.mark.parametrize("slopes", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_a_factor_that_ranks_or_passes_explain_is_named_beside_a_constant(factor, name, slopes):
    names, _ = named([factor] * STEPS, slopes=slopes, momentum=0.9)
    assert names == {name, "constant-factor", "another-divisor"}


@pytest.mark.parametrize("slopes", [UNEVEN, EVEN, 0 * EVEN], ids=["uneven", "even", "none"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_factors_that_differ_between_steps_are_no_constant(slopes, momentum):
    """A gradient that has kept its direction is not longer because of other weights."""
    names, _ = named((1.3, 0.8, 1.7, 0.6, 1.2, 0.9), slopes=slopes, momentum=momentum)
    assert names == {"another-divisor"}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_factor_of_the_first_step_alone_is_no_constant(momentum):
    names, _ = named([1.3] + [1.0] * (STEPS - 1), momentum=momentum)
    assert names == {"another-divisor"}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_or_two_leave_a_constant_and_another_factor_open(steps):
    assert named([0.9] * STEPS, steps=steps)[0] == {"constant-factor", "another-divisor"}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_windows_of_one_pass_are_divided_by_it_twice_and_stay_as_they_are(momentum):
    passes = (1, 1, 2, 3, 1, 2)
    counts = [{"passes": it} for it in passes]
    names, ratios = named([1 / it for it in passes], counts, momentum=momentum)
    assert any(0 < abs(it - 1) < 0.1 for it in ratios), "no other weights show in a window that stays as it is"
    assert names == {"gas-scaled-twice"}
    other, _ = named([1, 1, 1 / 2, 1 / 2, 1 / 3, 1], counts, momentum=momentum)
    assert other == {"another-divisor"}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_windows_that_hold_the_target_are_divided_by_what_they_hold(momentum):
    totals = (900.0, 900.0, 1200.0, 900.0, 1000.0, 300.0)
    counts = [{"total": it} for it in totals]
    names, _ = named([it / 900 for it in totals], counts, momentum=momentum)
    assert names == {"target-not-actual"}
    other, _ = named([1, 1, 1200 / 900, 0.5, 0.3, 0.5], counts, momentum=momentum)
    assert other == {"another-divisor"}


FEW = 3  # weights, of which a sketch has as many numbers that are not 0
BOWL = np.array([[9.0, 2.0, 1.0], [2.0, 5.0, -1.0], [1.0, -1.0, 3.0]])
PULLS = RNG.normal(size=(STEPS, FEW)) + 1.0


def summary(weights):
    sketch = (*weights.tolist(), *[0.0] * (32 - FEW))
    return Weights(
        checksum=sha256(repr(sketch).encode()).hexdigest(), norm=float(np.linalg.norm(weights)), sketch=sketch
    )


def small(factors, counts):
    """A run of SGD with a few weights."""
    weights, steps = np.ones(FEW), []
    begin = summary(weights)
    for at, factor in enumerate(factors):
        gradient = factor * (PULLS[at] + BOWL @ (weights - 1))
        weights = weights - 0.002 * gradient
        step = record(at + 1, np.linalg.norm(gradient), START)
        steps.append(step.model_copy(update={"weights": summary(weights), "lr": (0.002,), **counts[at]}))
    start = Start(norm=begin.norm, sketch=begin.sketch, dtype="fp32")
    header = trace([]).header.model_copy(update={"start": start})
    return Trace(header, tuple(steps))


def said(factors, counts):
    a, b = small([1.0] * STEPS, counts), small(factors, counts)
    causes = diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes
    ratios = [y.grad_norm / x.grad_norm for x, y in zip(a.steps, b.steps, strict=True)]
    return [{it.name for it in group} for group in grouped(causes)], ratios


def test_idle_passes_that_are_counted_leave_the_windows_without_any_as_they_are():
    totals, idle = (15.0, 14.0, 11.0, 14.0, 12.0, 12.0), (1, 2, 1, 2, 0, 0)
    counts = [{"total": total, "idle_passes": of, "passes": 4} for total, of in zip(totals, idle, strict=True)]
    groups, ratios = said([total / (total + of) for total, of in zip(totals, idle, strict=True)], counts)
    assert all(1e-4 < abs(it - 1) < 0.02 for it in ratios[4:]), "no other weights show in a window without idle passes"
    assert groups == [{"idle-counted"}]
    other = [total / (total + of) for total, of in zip(totals, (1, 2, 1, 2, 2, 3), strict=True)]
    assert said(other, counts)[0] == [{"another-divisor"}]


def test_idle_passes_are_named_beside_a_target_where_the_first_windows_have_none():
    """A window of the target's size lacks a rollout for each idle pass."""
    idle = (0, 0, 1, 0, 2, 1)
    counts = [{"total": 12.0 - of, "idle_passes": of, "passes": 6} for of in idle]
    assert said([1 - of / 12 for of in idle], counts)[0] == [{"idle-counted", "target-not-actual"}]
