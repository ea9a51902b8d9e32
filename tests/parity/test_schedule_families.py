"""Numbers of common schedules that a record leaves open, or shows: the true one is among those that are named."""

import math
import struct
from dataclasses import replace

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.parity.diagnosis.schedule_rests import without_repeats
from ds_parity.parity.diagnosis.view import View
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


EACH = pytest.mark.parametrize("each", [2, 3, 4])


def held(schedule, each):
    """A scheduler that moves once in so many updates, as where several epochs are trained on the same rollouts."""
    return lambda n: schedule(n // each)


@KINDS
@EACH
@pytest.mark.parametrize("warm_up", [0, 3])
@pytest.mark.parametrize(
    ("total", "moves", "share"),
    [
        (20, 20, 1.5),
        (20, 10, 0.75),
        *(pytest.param(*it, marks=pytest.mark.slow) for it in [(60, 24, 1.5), (100, 10, 0.75)]),
    ],
)
def test_another_length_is_named_where_both_move_once_in_several_steps(kind, each, warm_up, total, moves, share):
    sides = [held(schedule(kind, length, warm_up), each) for length in (total, round(share * total))]
    named = first_group(*sides, steps=each * moves)
    assert ("schedule-too-long" if share > 1 else "schedule-too-short") in named


@KINDS
@EACH
@pytest.mark.parametrize(("total", "moves"), [(20, 10), (60, 24), (100, 10)])
def test_more_moves_are_named_where_both_move_once_in_several_steps(kind, each, total, moves):
    a = schedule(kind, total)
    sides = held(a, each), held(lambda n: a(2 * n), each)
    assert {"scheduler-stepped-often", "schedule-too-short"} <= first_group(*sides, steps=each * moves)


@EACH
@pytest.mark.parametrize("digits", [4, 6])
@pytest.mark.parametrize("share", [0.75, 1.5])
def test_another_length_of_rates_that_are_held_is_named_in_few_digits(share, digits, each):
    sides = [held(schedule("line", length), each) for length in (20, round(20 * share))]
    assert ("schedule-too-long" if share > 1 else "schedule-too-short") in in_digits(sides, digits, each * 10)


@EACH
@pytest.mark.parametrize("begin", [8, 9, 10, 13])
@pytest.mark.parametrize("share", [0.75, 1.5])
def test_another_length_of_rates_that_are_held_is_named_in_an_excerpt(share, begin, each):
    """The first rate may be held for fewer steps in it."""
    warm_up = 1 + begin // each
    sides = [held(schedule("line", length, warm_up), each) for length in (40, round(40 * share))]
    named = first_group(*sides, begin=begin, steps=each * 12)
    assert ("schedule-too-long" if share > 1 else "schedule-too-short") in named


@pytest.mark.parametrize(("units", "known"), [(1, False), (2, True), (5, True)])
def test_steps_in_which_few_digits_may_hide_a_move_are_no_rests(units, known):
    """A rate that moves by half a unit of its last digit in each step moves by one in every second step."""
    sides = [[lambda n, by=by: 1 - by * units * (n // 2) / 100] for by in (1, 2)]
    pair = [replace(it, precision={"lr": Precision(decimals=5)}) for it in traces(*sides, 0, 16)]
    view = View(*pair, compare(*pair, Tier.REASSOCIATED))
    rates = [[step.lr[0] for step in it.steps] for it in pair]
    assert (without_repeats(view, *rates) is not None) == known


@pytest.mark.parametrize("digits", [4, 5, 6])
@pytest.mark.parametrize(("warm_up", "other"), [(3, 6), (6, 3), (4, 7), (3, 9)])
def test_another_warm_up_to_one_rate_is_named_in_few_digits(digits, warm_up, other):
    sides = [lambda n, to=to: min(1.0, (n + 1) / to) for to in (warm_up, other)]
    assert "another-warm-up" in in_digits(sides, digits, 12)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", ["constant", "line", "cosine"])
def test_a_warm_up_of_one_step_at_a_rate_of_0_is_another_than_none(kind, backwards):
    if kind == "constant":
        sides = [lambda n: 1.0, lambda n: min(1.0, n)]
    else:
        sides = [schedule(kind, 40), schedule(kind, 40, 1, before=0)]
    assert "another-warm-up" in first_group(*sides[:: -1 if backwards else 1], steps=12)


@pytest.mark.parametrize("length", [0.5, 0.75, 1.5])
@pytest.mark.parametrize(("warm_up", "other"), [(2, 6), (6, 3), (8, 4)])
@pytest.mark.parametrize("total", [100, 1000])
def test_lines_of_another_length_behind_another_warm_up_come_to_no_rate_within_a_step(total, warm_up, other, length):
    """Any two of them come to some rate together, and that may be between two steps."""
    a, b = schedule("line", total, warm_up), schedule("line", round(total * length), other)
    assert "another-warm-up" not in first_group(a, b, steps=12)


@pytest.mark.parametrize("factor", [0.3, 0.5, 2])
def test_a_factor_of_all_rates_is_no_other_warm_up(factor):
    a = schedule("cosine", 100, 5)
    assert first_group(a, lambda n: factor * a(n), steps=20) == {"base-lr"}


def test_rates_of_unlike_sizes_ask_for_no_warm_up_without_end():
    rates = [0.25, 0.5, 1.0, 0.9, 0.8, 0.7, 0.6]
    pair = traces([rates.__getitem__], [lambda n: (n + 1) * 1e-310], begin=0, steps=len(rates))
    assert {cause.name for cause in diagnose(*pair, compare(*pair, Tier.REASSOCIATED)).causes} <= {"base-lr"}


def in_digits(schedules, digits, steps):
    """Rates as they were logged in so many significant digits, and the names that are given first."""
    sides = [[lambda n, rate=rate: float(f"{rate(n):.{digits}g}")] for rate in schedules]
    pair = [replace(it, precision={"lr": Precision(significant=digits)}) for it in traces(*sides, 0, steps)]
    groups = grouped(diagnose(*pair, compare(*pair, Tier.REASSOCIATED)).causes)
    return {cause.name for cause in groups[0]} if groups else set()


@pytest.mark.parametrize("warm_up", [0, 3, 5])
@pytest.mark.parametrize("before", [0, 1])
@KINDS
def test_a_rate_that_stays_behind_its_warm_up_shows_no_way_down(kind, warm_up, before):
    constant = schedule("line", 1e30, warm_up, before=before)
    other = schedule(kind, 100, warm_up, before=before)
    assert first_group(constant, other, steps=16) == set()
    # Rates of one decimal are the reference's, rounded, too, and those of a schedule that hardly moves.
    assert first_group(other, constant, steps=16) & {"schedule-too-long", "lr-rounded"} != {"schedule-too-long"}


@pytest.mark.parametrize(("warm_up", "steps"), [(20, 5), (100, 5), (100, 12)])
def test_a_line_is_no_slower_logarithm(warm_up, steps):
    def logarithm(n):
        return math.log(n + 1) / math.log(warm_up)

    assert first_group(logarithm, lambda n: n / warm_up, steps=steps) == set()


@KINDS
@pytest.mark.parametrize("warm_up", [3, 4, 10])
def test_a_schedule_without_its_warm_up_is_as_many_steps_ahead(kind, warm_up):
    a = schedule(kind, 300, warm_up)
    named = first_group(a, lambda n: a(n + warm_up), steps=2 * warm_up - 1)
    assert named == {"another-warm-up", "schedule-off-by-steps"}


@KINDS
@pytest.mark.parametrize("by", [1, -1])
def test_a_step_ahead_or_behind_is_no_warm_up_of_one_step(kind, by):
    """One that begins at its highest rate is as well none."""
    a = schedule(kind, 100)
    named = first_group(a, lambda n: a(max(0, n + by)), steps=12)
    assert "schedule-off-by-steps" in named
    assert "another-warm-up" not in named


@KINDS
@pytest.mark.parametrize("warm_up", [3, 5])
def test_no_warm_up_is_named_where_rates_are_those_of_the_next_step(kind, warm_up):
    a, b = (schedule(kind, 100, steps) for steps in (warm_up, 0))
    assert "another-warm-up" in first_group(lambda n: a(n) if n < warm_up else a(n + 1), lambda n: b(n + 1), steps=16)


@KINDS
def test_a_warm_up_that_begins_a_step_late_at_a_rate_of_its_own_is_a_step_behind(kind):
    a = schedule(kind, 100, 5)
    assert first_group(a, lambda n: a(n - 1) if n else 0.0, steps=12) == {"schedule-off-by-steps"}


@pytest.mark.parametrize("low", [1e-4, 1e-3])
@pytest.mark.parametrize("digits", [3, 4, 5])
def test_a_low_rate_is_known_as_closely_as_it_is_written(low, digits):
    """Another warm-up and another lowest rate: neither gives the rates alone."""
    sides = (schedule("line", 20, 3), schedule("line", 20, 6, low=low))
    assert in_digits(sides, digits, 24) == set()


@pytest.mark.parametrize("factor", [0.5, 0.3, 0.25])
def test_a_factor_of_a_rate_that_hardly_moves_is_no_short_schedule(factor):
    def slow(n):
        return 0.037 + 0.963 * (1 - (n - 1) / 99999) ** 2 if n else 0.0

    assert in_digits((lambda n: 5e-2 * slow(n), lambda n: factor * 5e-2 * slow(n)), 4, 16) == set()


def single(rate):
    """A rate as an event file holds it."""
    return struct.unpack("f", struct.pack("f", 1e-3 * rate))[0] / 1e-3


@pytest.mark.parametrize("side", [0, 1, 2])
@KINDS
def test_rates_of_one_side_or_both_may_be_in_single_precision(kind, side):
    a, b = schedule(kind, 60, 3), schedule(kind, 60, 6)
    sides = [lambda n: single(a(n)) if side != 1 else a(n), lambda n: single(b(n)) if side else b(n)]
    assert "another-warm-up" in first_group(*sides, steps=24)


def parabola(warm_up, total=60, low=0.0):
    down = schedule("line", total, warm_up)
    return lambda n: down(n) if n < warm_up else low + (1 - low) * down(n) ** 2


def logarithm(warm_up, kind="cosine", total=60):
    down = schedule(kind, total, warm_up)
    return lambda n: math.log(n + 1) / math.log(warm_up) if n < warm_up else down(n)


@pytest.mark.parametrize(("warm_up", "other"), [(3, 6), (6, 4)])
@pytest.mark.parametrize("made", [parabola, logarithm, lambda w: parabola(w, low=0.0371), lambda w: parabola(w, 61)])
def test_another_warm_up_in_front_of_any_kind_of_way_down_is_named(made, warm_up, other):
    assert "another-warm-up" in first_group(made(warm_up), made(other), steps=24)


@KINDS
@pytest.mark.parametrize("low", [0.0371, 0.61, 1 / 3])
def test_another_warm_up_is_named_whatever_the_lowest_rate(kind, low):
    """A rate that is no round one, and that the record does not come to."""
    sides = (schedule(kind, 60, steps, low=low) for steps in (3, 6))
    assert "another-warm-up" in first_group(*sides, steps=24)


@KINDS
def test_a_warm_up_that_lies_in_front_of_the_way_down_leaves_it_as_long(kind):
    assert "another-warm-up" in first_group(schedule(kind, 63, 3), schedule(kind, 68, 8), steps=24)


@KINDS
def test_both_ways_down_have_ended(kind):
    assert "another-warm-up" in first_group(schedule(kind, 20, 3), schedule(kind, 20, 6), steps=40)


@KINDS
@pytest.mark.parametrize("moves", [2, 3])
def test_more_moves_in_a_step_are_named_behind_a_warm_up(kind, moves):
    a = schedule(kind, 100, 6)
    assert "scheduler-stepped-often" in first_group(a, lambda n: a(moves * n), steps=12, passes=None)


@KINDS
def test_a_warm_up_that_is_not_over_shows_no_other_length(kind):
    """The reference's highest rate is not known: a rate that is as many times another may be that of another run."""
    assert "another-lowest-lr" not in first_group(schedule(kind, 60, 20), schedule(kind, 60, 30), steps=10)
