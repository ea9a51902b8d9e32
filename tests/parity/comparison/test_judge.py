"""What is computed for many steps at once is what each by itself comes to: verdict, gap, limit, count and bias."""

import math
import random
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_parity.parity.comparison import blocks
from ds_parity.parity.comparison.alignment import align
from ds_parity.parity.comparison.bounds import EPS, Tier
from ds_parity.parity.comparison.compare import compare, setting
from ds_parity.parity.comparison.distances import of_weights, signed
from ds_parity.parity.comparison.fields import BOUNDED, value_of
from ds_parity.trace import Trace
from ds_parity.trace.columns import SIZE, Columns
from tests.parity.comparison import alone
from tests.parity.comparison.comparing import HEADER, record, trace, weights
from tests.parity.comparison.moved import bounds, traces, ulps

FIGURES = (0.0, -0.0, 1.0, math.nextafter(1.0, 2), -3.0, 1e-200, 1e200, 5e-324, 1e308, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_signed_differences(floor):
    pairs = list(product(FIGURES, FIGURES))
    found = signed(*np.array(pairs).T, floor)
    assert repr(found.tolist()) == repr([alone.signed(a, b, floor) for a, b in pairs])


def test_distances_of_weights_however_great_or_small_they_are():
    held = [weights(norm, (x, y)) for norm in (1.0, 0.0, 1e-200, math.inf, -1.0) for x, y in product(FIGURES, FIGURES)]
    others = [weights(it.norm, (it.sketch[0], 1e200)) for it in held] + [weights(2.0, it.sketch[::-1]) for it in held]
    a, b = ([record(at, weights=it) for at, it in enumerate(side, 1)] for side in (held * 2, others))
    gap, nan, _ = of_weights(Columns.of(a).weights(), Columns.of(b).weights())
    pairs = [(x.weights, y.weights) for x, y in zip(a, b, strict=True)]
    assert repr(gap.tolist()) == repr([alone.gap(x, y) for x, y in pairs])
    assert nan.tolist() == [alone.has_nan(x) or alone.has_nan(y) for x, y in pairs]


def by_blocks(comparison):
    """What is to be checked of a comparison; its text tells every bit of a float, and NaN from NaN not."""
    rows = [
        (row.step, row.terms, row.loss, row.lr, row.grad_norm, row.weights, *named(row.differences))
        for row in comparison.rows
    ]
    # All but that the traces share no field, which no step says.
    alike = [it for it in comparison.found if it.name != "step" or it.first.step]
    found = [(it.name, it.count, it.first.step, it.furthest) for it in alike]
    measured = [(it.field, it.step, it.difference, it.bound) for it in comparison.measured]
    return repr(rows), repr(found), repr(measured)


def named(differences):
    return [(it.field, it.difference, it.bound) for it in differences]


def by_steps(pair, tier, dtype):
    """The same of two traces, from every step by itself."""
    aligned, ruler = align(*pair), setting(*pair, tier, dtype).ruler
    steps = alone.steps_of(aligned, ruler)
    rows, found = [], {}
    for step, one in steps.items():
        differences = one.differences() if one else [("step", None, None)]
        gaps = [one.gap(name) if one else None for name in ("loss", "lr", "grad_norm", "weights")]
        rows.append((step, aligned.terms[step], *gaps, *differences))
        for name, gap, _ in differences:
            found.setdefault(name, []).append((step, gap))
    last = [] if tier is Tier.EXACT else list(alone.biases(steps, ruler))
    found |= {name: [(None, mean)] for name, mean, _ in last}
    counted = [(name, len(it), it[0][0], furthest([gap for _, gap in it])) for name, it in found.items()]
    measured = [] if tier is Tier.EXACT else alone.measured(steps)
    return repr(rows), repr(counted), repr(measured)


def furthest(gaps):
    known = [gap for gap in gaps if gap is not None]
    return alone.greatest(known) if known else None


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(traces(), st.sampled_from([1, 2, 3, SIZE]))
def test_every_verdict_gap_and_limit_of_every_step_and_field(drawn, size):
    (tier, dtype), pair = drawn
    assume(all(side.steps for side in pair))  # without steps there is a difference of the traces, and not of a step
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "SIZE", size)
        comparison = compare(*pair, tier, dtype)
    assert by_blocks(comparison) == by_steps(pair, tier, dtype)


# A field's value, what its bound is relative to, and the changes to a record that give it another value.
AT_THE_BOUND = {
    "loss": (0.5, 0.5, lambda value: {"loss": value}),
    "grad_norm": (2.0, 2.0, lambda value: {"grad_norm": value}),
    "metrics.reward": (0.25, 0.25, lambda value: {"metrics": {"reward": value}}),
    "the norm of weights": (10.0, 10.0, lambda value: {"weights": weights(value)}),
    "a sketch of weights": (3.0, 10.0 * math.sqrt(2), lambda value: {"weights": weights(sketch=(value, -4.0))}),
}


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("field", AT_THE_BOUND)
def test_the_last_ulp_that_is_allowed_and_the_first_that_is_not(field, dtype):
    """A trace for each ulp around the bound, which lies between two of them."""
    value, scale, changes = AT_THE_BOUND[field]
    name = "weights" if "weights" in field else "loss" if field.startswith("metrics") else field
    equal = []
    for count in range(-9, 10):
        pair = trace(record(1)), trace(record(1, **changes(ulps(value + scale * bounds(1, dtype)[name], count))))
        comparison = compare(*pair, Tier.REASSOCIATED, dtype)
        assert by_blocks(comparison) == by_steps(pair, Tier.REASSOCIATED, dtype)
        equal.append(comparison.equal)
    assert equal == sorted(equal, reverse=True)
    assert {*equal} == {True, False}


HARD = {
    "zeros of both signs": [{name: value} for value in (0.0, -0.0) for name in ("loss", "grad_norm", "total")],
    "zero rates": [{"lr": lr} for lr in ((0.0, 1.0), (-0.0, 1.0), (0.0,), ())],
    "NaN behind one checksum": [
        {"weights": weights(sketch=it)} for it in ((3.0, 1.0), (math.nan, 1.0), (math.inf, 1.0))
    ],
    "a norm that is NaN": [{"weights": weights(norm=norm)} for norm in (10.0, math.nan, 0.0)],
    "counts of one trace": [{name: it} for it in (None, 0) for name in ("rollouts", "tokens")],
}


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("case", HARD)
def test_each_of_some_values_against_each_other(case, tier):
    for one, other in product(HARD[case], HARD[case]):
        pair = trace(record(1, **one)), trace(record(1, **other))
        assert by_blocks(compare(*pair, tier)) == by_steps(pair, tier, "fp32")


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("seed", range(3))
def test_more_steps_than_a_block_holds(tier, seed):
    """Runs of steps that only one trace has, and single steps that differ, over several blocks."""
    rng = random.Random(seed)
    steps = range(1, 2 * SIZE + 50)
    a, b = ([record(step, **noise(rng, step)) for step in steps if not 300 < step < 300 + 10 * side] for side in (0, 1))
    pair = Trace(HEADER, tuple(a)), Trace(HEADER, tuple(it for it in b if rng.random() > 0.002))
    assert by_blocks(compare(*pair, tier)) == by_steps(pair, tier, "fp32")


def noise(rng, step):
    allowed = bounds(step, "fp32")
    sketch = tuple(1.0 / at for at in range(1, rng.choice([17, 17, 17, 3])))
    moved = {name: 1 + allowed[name] * rng.choice([0, 0.3, -0.3, 1.5 * (rng.random() < 0.01)]) for name in BOUNDED}
    return {
        "loss": 0.75 * moved["loss"],
        "grad_norm": None if rng.random() < 0.01 else 2.0 * moved["grad_norm"],
        "lr": (1e-3, 1e-4)[: rng.choice([2, 2, 2, 1])],
        "weights": weights(10.0 * moved["weights"], sketch, rng.choice("ab")),
    }


@settings(max_examples=100, deadline=None)
@given(traces())
def test_what_a_difference_shows_is_what_the_records_hold(drawn):
    (tier, dtype), pair = drawn
    aligned = align(*pair)
    sides = [{it.step: it for it in side.steps} for side in (aligned.reference, aligned.candidate)]
    for row in compare(*pair, tier, dtype).rows:
        for it in row.differences:
            held = [None if it.field == "step" else value_of(side.get(row.step), it.field) for side in sides]
            shown = [it.reference, it.candidate]
            assert it.why.startswith((f"{it.field} ", f"step {row.step} is in"))
            if it.field not in ("step", "weights"):
                assert repr(shown) == repr(held)
            assert (None in shown) == (it.difference is None)
