"""Numbers of common schedules that a record leaves open, or shows: the true one is among those that are named."""

import math
from dataclasses import replace

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Precision
from tests.parity.test_schedule_excerpts import first_group, traces


def schedule(kind, total, warm_up=0, low=0.0, before=1):
    """A warm-up, and a way down in what is left of the steps, as in transformers; `before`: 1 begins above 0."""

    def rate(n):
        if n < warm_up:
            return (n + before) / warm_up
        way = min(1.0, (n - warm_up) / (total - warm_up))
        down = 1 - way if kind == "line" else (1 + math.cos(math.pi * way)) / 2
        return low + (1 - low) * down

    return rate


KINDS = pytest.mark.parametrize("kind", ["line", "cosine"])


@KINDS
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(("warm_up", "other"), [(5, 10), (3, 9), (10, 5), (2, 1)])
@pytest.mark.parametrize("total", [60, 1000, 5000])
def test_another_warm_up_in_front_of_a_way_down_is_named(kind, before, warm_up, other, total):
    a, b = (schedule(kind, total, steps, before=before) for steps in (warm_up, other))
    assert "another-warm-up" in first_group(a, b, steps=16)


@KINDS
@pytest.mark.parametrize("total", [100, 1000, 5000])
@pytest.mark.parametrize("steps", [8, 12, 40])
def test_more_moves_in_a_step_and_fewer_steps_leave_the_same_rates(kind, total, steps):
    a = schedule(kind, total)
    named = first_group(a, lambda n: a(2 * n), steps=steps, passes=None)
    assert {"scheduler-stepped-often", "schedule-too-short", "scheduler-per-pass"} <= named


@KINDS
@pytest.mark.parametrize("share", [0.9, 1.1, 0.5, 2, 3])
@pytest.mark.parametrize("total", [100, 1000, 5000])
def test_another_number_of_steps_is_named_beside_another_lowest_rate(kind, share, total):
    named = first_group(schedule(kind, total), schedule(kind, share * total), steps=12)
    assert ("schedule-too-long" if share > 1 else "schedule-too-short") in named


@KINDS
@pytest.mark.parametrize("low", [0.1, 1 / 30])
def test_another_lowest_rate_is_named(kind, low):
    assert "another-lowest-lr" in first_group(schedule(kind, 60), schedule(kind, 60, low=low), steps=40)


@pytest.mark.parametrize("digits", [4, 5, 6])
@pytest.mark.parametrize(("warm_up", "other"), [(3, 6), (6, 3), (4, 7), (3, 9)])
def test_another_warm_up_to_one_rate_is_named_in_few_digits(digits, warm_up, other):
    sides = [[lambda n, to=to: float(f"{min(1.0, (n + 1) / to):.{digits}g}")] for to in (warm_up, other)]
    pair = [replace(it, precision={"lr": Precision(significant=digits)}) for it in traces(*sides, 0, 12)]
    groups = grouped(diagnose(*pair, compare(*pair, Tier.REASSOCIATED)).causes)
    assert "another-warm-up" in {cause.name for cause in groups[0]}


@pytest.mark.parametrize("factor", [0.3, 0.5, 2])
def test_a_factor_of_all_rates_is_no_other_warm_up(factor):
    a = schedule("cosine", 100, 5)
    assert first_group(a, lambda n: factor * a(n), steps=20) == {"base-lr"}


def test_rates_of_unlike_sizes_ask_for_no_warm_up_without_end():
    rates = [0.25, 0.5, 1.0, 0.9, 0.8, 0.7, 0.6]
    pair = traces([rates.__getitem__], [lambda n: (n + 1) * 1e-310], begin=0, steps=len(rates))
    assert {cause.name for cause in diagnose(*pair, compare(*pair, Tier.REASSOCIATED)).causes} <= {"base-lr"}
