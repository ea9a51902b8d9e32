"""Learning rates at other places of the reference's schedule: all that lead there are named as one group."""

import itertools
import math
import random

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace
from tests.parity.lines_run import lines_run

PASSES, STEPS = 4, 16


def trace(rates, passes=(PASSES,) * STEPS, off=(), skipped=()):
    """A run with these learning rates of each parameter group; `off`: steps whose losses and norms are others."""
    draw = random.Random(1)
    header = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=1, config_hash="ab", engine="other")
    counts = {"idle_passes": 0, "rollouts": 16, "prompts": 4, "tokens": 900, "total": 900.0}
    steps = []
    for n, (rate, some) in enumerate(zip(rates, passes, strict=True)):
        loss = 2 - 0.03 * n + 0.1 * draw.random() + 0.01 * (n in off)
        counts |= {"grad_norm": draw.random() + 0.01 * (n in off), "passes": some, "skipped": n in skipped}
        steps.append(StepRecord(step=n + 1, loss=loss, lr=rate, **counts))
    return Trace(header, tuple(steps))


def first_group(schedule, faulty, passes=(PASSES,) * STEPS, skipped=()):
    """The causes that are named first where a schedule is another; each returns a rate or several."""
    of_a, of_b = (
        [it if isinstance(it := rate(n), tuple) else (it,) for n in range(STEPS)] for rate in (schedule, faulty)
    )
    first = next(n for n in range(STEPS) if of_a[n] != of_b[n])
    a, b = trace(of_a, passes, skipped=skipped), trace(of_b, passes, range(first + 1, STEPS), skipped)
    causes = diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes
    return {cause.name for cause in grouped(causes)[0]} if causes else set()


def linear(n):
    return 1e-3 * (1 - n / 40)


def cosine(n):
    return 5e-4 * (1 + math.cos(math.pi * n / 40))


def warm(n):
    return 1e-3 * min(1.0, (n + 1) / 6)


@pytest.mark.parametrize("schedule", [linear, cosine, warm])
def test_a_schedule_a_step_behind_from_the_start_may_have_begun_again_in_step_two(schedule):
    """Whichever it is, the second step has the first one's rate."""
    named = first_group(schedule, lambda n: schedule(max(0, n - 1)))
    assert named == {"schedule-off-by-steps", "resume-resets-schedule"}


@pytest.mark.parametrize("schedule", [linear, cosine, warm])
def test_a_schedule_that_begins_again_later_is_no_schedule_that_is_behind(schedule):
    assert first_group(schedule, lambda n: schedule(n - 3 * (n >= 3))) == {"resume-resets-schedule"}


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_a_schedule_that_goes_back_to_a_later_step_than_the_first_has_not_begun_again(schedule):
    assert first_group(schedule, lambda n: schedule(n - 3 * (n >= 8))) == {"schedule-off-by-steps"}


def test_a_scheduler_that_moves_with_every_pass_is_named_where_the_schedule_comes_to_rest():
    """Warm-up is over in the second step: a schedule that is ahead, or a shorter warm-up, has the same rates."""
    named = first_group(warm, lambda n: warm(PASSES * n))
    assert {"scheduler-per-pass", "schedule-off-by-steps"} <= named


def test_a_scheduler_that_moves_with_every_pass_is_named_where_windows_have_other_numbers_of_them():
    passes = tuple(2 + n % 3 for n in range(STEPS))
    named = first_group(linear, lambda n: linear(sum(passes[:n])), passes)
    assert named == {"scheduler-per-pass"}


def test_a_schedule_that_ends_at_a_lowest_rate_is_followed_to_it():
    named = first_group(linear, lambda n: max(1e-4, linear(PASSES * n)))
    assert named == {"scheduler-per-pass", "schedule-too-short"}


def to_zero(steps, begins=0):
    """A line to 0, which rests there, as torch's LinearLR and the linear schedule of transformers have it."""
    return lambda n: 1e-3 * max(0.0, 1 - (n + begins) / steps)


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("steps", [12, 18, 24])
def test_a_line_over_fewer_steps_is_that_of_a_scheduler_that_is_stepped_often(times, begins, steps):
    """lr * (1 - s / (T / 2)) and lr * (1 - 2 s / T) are one number, whichever step a schedule counts from."""
    schedule = to_zero(steps, begins)
    shorter = first_group(schedule, to_zero(steps / times, begins))
    assert shorter == {"schedule-too-short", "scheduler-stepped-often"}
    assert first_group(schedule, lambda n: schedule(times * n + begins * (times - 1))) == shorter


def test_passes_may_be_as_many_as_a_schedule_is_too_short_by():
    named = first_group(to_zero(36), to_zero(9))
    assert named == {"schedule-too-short", "scheduler-per-pass"}


def test_a_line_that_moves_with_passes_of_other_numbers_is_no_shorter_one():
    passes = tuple(2 + n % 3 for n in range(STEPS))
    schedule = to_zero(36)
    assert first_group(schedule, lambda n: schedule(sum(passes[:n])), passes) == {"scheduler-per-pass"}


def test_a_curve_from_the_last_of_two_moves_on_is_no_shorter_one():
    """A shorter one begins at the highest rate, as the reference does."""

    def schedule(n):
        return cosine(min(40, 5 * n))

    assert first_group(schedule, lambda n: schedule(2 * n + 1)) == {"scheduler-stepped-often"}
    assert "schedule-too-short" in first_group(schedule, lambda n: schedule(2 * n))


def test_no_cause_is_named_for_the_first_of_two_parameter_groups_alone():
    rates = [7, 3, 9, 1, 8, 2, 6, 4, 5, 3, 7, 9, 2, 8, 1, 6]
    found = first_group(lambda n: (linear(n), linear(n)), lambda n: (linear(n + 1), 1e-4 * rates[n]))
    assert found == set()


def test_a_factor_and_a_step_that_give_the_same_rates_are_one_group():
    """An exponential schedule a step ahead."""
    assert first_group(lambda n: 0.9**n, lambda n: 0.9 ** (n + 1)) == {"base-lr", "schedule-off-by-steps"}


RATE_MODULES = ("learning_rate.py", "rates.py", "schedule_shapes.py", "schedule_positions.py", "schedule_stairs.py")


def work(make, steps, groups=1):
    """How much is done about a run of some steps and parameter groups; `make` returns rates of both sides."""
    of_a, of_b = ([tuple(rate * 0.9**n for n in range(groups)) for rate in rates] for rates in make(steps))
    passes = (PASSES,) * steps
    first = next(n for n in range(steps) if of_a[n] != of_b[n])
    a, b = trace(of_a, passes), trace(of_b, passes, range(first + 1, steps))
    found = compare(a, b, Tier.REASSOCIATED)
    return lines_run(lambda: diagnose(a, b, found), *RATE_MODULES)


def cycles(steps):
    return [1e-3 * (1 - abs(n % 20 - 10) / 12) for n in range(steps)]


def noise(steps, seed=1):
    draw = random.Random(seed)
    return [1e-3 * draw.random() for _ in range(steps)]


PAIRS = {
    "cycles and noise": lambda steps: (cycles(steps), noise(steps)),
    "cycles, shifted": lambda steps: (cycles(steps), cycles(steps + 7)[7:]),
    "noise and noise": lambda steps: (noise(steps), noise(steps, 2)),
    "flat for long": lambda steps: tuple(
        [1e-3 * min(1.0, (steps - n) / at) for n in range(steps)] for at in (steps // 10, steps // 9)
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_work_on_learning_rates_is_a_few_lines_for_each_step(pair):
    steps = 1000
    assert work(PAIRS[pair], steps) < 400 * steps


def test_no_later_parameter_group_is_looked_at_once_no_cause_is_left():
    one, many = (work(PAIRS["cycles and noise"], 200, groups) for groups in (1, 20))
    assert many < 2 * one


def test_parameter_groups_that_are_multiples_of_the_first_are_not_searched_again():
    one, many = (work(PAIRS["cycles, shifted"], 200, groups) for groups in (1, 20))
    assert many < 4 * one


@pytest.mark.parametrize("last", [linear, lambda n: 1e-3 - linear(n), lambda n: linear(n) ** 2])
def test_a_group_that_is_no_multiple_of_the_first_has_to_fit_as_well(last):
    ahead = first_group(
        lambda n: (cosine(n), 2 * cosine(n), last(n)), lambda n: (cosine(n + 1), 2 * cosine(n + 1), 1.0)
    )
    assert ahead == set()


NOT_FINITE = [math.inf, -math.inf, math.nan, 1.7e308]


@pytest.mark.parametrize(("wrong", "places"), itertools.product(NOT_FINITE, [(0,), (0, 1), (1, 2), (5,), (14, 15)]))
@pytest.mark.parametrize("side", [0, 1])
def test_rates_that_are_not_finite_have_no_schedule(wrong, places, side):
    rates = [[linear(n) for n in range(STEPS)], [linear(n + 1) for n in range(STEPS)]]
    for at in places:
        rates[side][at] = wrong
    # Gradient norms that are the same show that no such rate was used.
    assert first_group(rates[0].__getitem__, rates[1].__getitem__) <= {"reported-lr"}


@pytest.mark.parametrize("rates", [([-1.0, 0.5, 0.2], [-1.0, math.nan, math.inf]), ([math.inf] * 3, [1e-3] * 3)])
def test_no_factor_and_no_highest_rate_is_found_among_rates_that_are_not_finite(rates):
    of_a, of_b = (side + [side[-1]] * (STEPS - 3) for side in rates)
    assert first_group(of_a.__getitem__, of_b.__getitem__) == set()
    assert first_group(of_b.__getitem__, of_a.__getitem__) == set()


@pytest.mark.parametrize("by", [1, 2, 3])
@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("before", [0, 1])
def test_a_schedule_that_is_ahead_by_its_whole_warm_up_is_one_of_those_that_rest(steps, by, before):
    def schedule(n):
        return 1e-3 * min(1.0, (n + before) / steps)

    named = first_group(schedule, lambda n: schedule(n + by))
    assert "schedule-off-by-steps" in named
    # One rate in all steps is that of no scheduler, too.
    assert ("no-scheduler" in named) is (by >= steps - before)


def falling(n):
    return 1e-3 * max(0.1, 1 - n / 10)


@pytest.mark.parametrize(
    ("faulty", "right"),
    [
        (lambda n: 5e-4, {"no-scheduler"}),
        (lambda n: 1e-4, {"no-scheduler", "scheduler-stepped-often", "schedule-off-by-steps"}),
        # What rests from its middle on is at one of many places, and no other cause says at which.
        (lambda n: falling(n + 9 * (n >= 5)), set()),
        (lambda n: 2e-4 if n >= 5 else falling(n), set()),
    ],
)
def test_a_rate_that_rests_is_ahead_only_where_the_reference_comes_to_it(faulty, right):
    assert first_group(falling, faulty) == right


def test_rates_that_all_differ_by_rounding_from_where_they_rest_say_nothing_of_when_they_do():
    named = first_group(lambda n: 1e-3 * (1 + 9e-7 * (n == 0)), lambda n: 1e-3 * (1 - 9e-7))
    assert "schedule-off-by-steps" not in named


@pytest.mark.parametrize("stops", [1, 2, 3])
@pytest.mark.parametrize("schedule", [linear, cosine, warm])
def test_a_scheduler_that_stops_is_not_one_that_moves_once_in_many_steps(schedule, stops):
    """One move shows no period."""
    assert "scheduler-per-outer-step" not in first_group(schedule, lambda n: schedule(min(n, stops)))


@pytest.mark.parametrize("each", [2, 5, 7])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_scheduler_that_moves_twice_in_even_distances_moves_once_in_as_many_steps(each, offset):
    assert "scheduler-per-outer-step" in first_group(cosine, lambda n: cosine((n + offset) // each))


@pytest.mark.parametrize(
    ("rests", "offset", "named"),
    [
        (5, 0, {"scheduler-per-outer-step"}),
        (7, 1, {"scheduler-per-outer-step", "schedule-off-by-steps", "resume-resets-schedule"}),
    ],
)
def test_one_move_behind_moves_from_a_rate_to_the_same_one_shows_a_period(rests, offset, named):
    """DeepSpeed's schedulers begin with the rate of step 0 twice: of short traces a slower one moves once."""

    def schedule(n):
        return linear(max(0, n - rests))

    assert first_group(schedule, lambda n: schedule((n + offset) // 2)) == named


def test_one_move_of_a_schedule_that_goes_by_steps_is_at_a_slower_pace_or_every_second_step():
    named = first_group(lambda n: 1e-3 * 0.5 ** (n // 4), lambda n: 1e-3 * 0.5 ** (n // 8))
    assert named == {"schedule-too-long", "scheduler-per-outer-step"}


def told(schedule, faulty, losses=True):
    """All that is said of the causes of another schedule."""
    of_a, of_b = ([(rate(n),) for n in range(STEPS)] for rate in (schedule, faulty))
    first = next(n for n in range(STEPS) if of_a[n] != of_b[n])
    passes = (PASSES,) * STEPS
    a, b = trace(of_a, passes), trace(of_b, passes, range(first + 1, STEPS) if losses else ())
    return diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes


def by_tens(n):
    return 0.003 * 0.1**n


NEAR = {
    "a tail that is frozen": (by_tens, lambda n: by_tens(min(n, 9))),
    "a tail that is twice as high": (by_tens, lambda n: by_tens(n) * (1 + (n >= 9))),
    "an ulp in each rate": (warm, lambda n: math.nextafter(warm(n), 1.0)),
    "an ulp in some": (warm, lambda n: math.nextafter(warm(n), 1.0) if n % 3 == 1 else warm(n)),
    "an ulp at rest": (warm, lambda n: math.nextafter(warm(n), 1.0) if n > 7 else warm(n)),
    "a ten millionth behind the first": (linear, lambda n: linear(n) * (1 + 1e-7 * (n > 0))),
}


@pytest.mark.parametrize("losses", [True, False])
@pytest.mark.parametrize(("schedule", "faulty"), NEAR.values(), ids=NEAR)
def test_what_lies_within_the_rounding_of_a_prediction_names_no_schedule(schedule, faulty, losses):
    """The reference's own rates predict it as well."""
    assert {cause.name for cause in told(schedule, faulty, losses)} <= {"reported-lr"}


@pytest.mark.parametrize("share", [1e-4, 1e-3, 0.5])
def test_another_lowest_rate_that_is_hardly_another_is_at_no_other_pace(share):
    (cause,) = told(cosine, lambda n: 1e-3 + (1 - share) * (cosine(n) - 1e-3))
    assert cause.name == "another-lowest-lr"
    assert " 1 times" not in cause.evidence


def test_a_factor_next_to_one_that_all_rates_have_is_named():
    (cause,) = told(cosine, lambda n: cosine(n) * (1 + 1e-5))
    assert cause.name == "base-lr"
    assert "1.00001 times" in cause.evidence


def test_a_rounded_rate_is_shown_in_a_step_in_which_it_is_another():
    """The first one may be written in as many decimals."""
    (cause,) = told(cosine, lambda n: round(cosine(n), 5))
    assert cause.name == "lr-rounded"
    assert "(0.001, where 0.0009985 was due)" in cause.evidence


def exponential(n):
    return 3e-3 * 0.97**n


SKIPPED = {
    "one": (1,),
    "the first": (0,),
    "two in a row": (5, 6),
    "several": (2, 5, 9),
    "the last": (STEPS - 1,),
}


def resting(schedule, skipped):
    """A schedule that stays where it is when a step was skipped."""
    return lambda n: schedule(n - sum(at < n for at in skipped))


@pytest.mark.parametrize("skipped", SKIPPED.values(), ids=SKIPPED)
@pytest.mark.parametrize(
    ("schedule", "faulty", "names"),
    [
        (exponential, lambda n: exponential(n + 20), {"base-lr", "schedule-off-by-steps"}),
        (cosine, lambda n: cosine(n + 3), {"schedule-off-by-steps"}),
        (warm, lambda n: warm(max(0, n - 1)), {"schedule-off-by-steps", "resume-resets-schedule"}),
        (cosine, lambda n: cosine(n // 2), {"scheduler-per-outer-step"}),
        (cosine, lambda n: 2 * cosine(n), {"base-lr"}),
    ],
)
def test_a_rest_that_a_skipped_step_leaves_is_no_place_of_the_schedule(schedule, faulty, names, skipped):
    assert first_group(resting(schedule, skipped), resting(faulty, skipped), skipped=skipped) == names


def test_a_scheduler_that_moves_behind_a_skipped_step_has_left_no_rest_out():
    assert first_group(resting(cosine, (4,)), cosine, skipped=(4,)) == {"scheduler-on-skipped-step"}


def from_zero(n):
    return 1e-3 * n


@pytest.mark.parametrize("lowest", [0.0, 1e-5])
@pytest.mark.parametrize("schedule", [linear, cosine, lambda n: 1e-3 * (1 - n / 40) ** 2])
def test_a_rate_that_the_reference_has_not_come_to_may_be_that_behind_its_end(schedule, lowest):
    assert "schedule-off-by-steps" in first_group(lambda n: lowest + schedule(n), lambda n: lowest)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        (linear, 1e-3),
        (linear, 8e-4),
        (linear, -1e-5),
        (lambda n: 1e-4 * (n + 2), 1e-5),
        (lambda n: 1e-3, 1e-5),
        (lambda n: 1e-3 if n < STEPS - 1 else math.nextafter(1e-3, 0.0), 1e-5),
        (lambda n: 1e-3 * 0.9**n, 1e-5),
        (lambda n: 1e-3 / (1 + n % 2), 1e-5),
    ],
)
def test_a_rate_that_no_end_of_the_schedule_has_is_not_behind_it(schedule, rate):
    """The highest rate is that without a scheduler; what rises, rests, or falls by a factor comes to no end below."""
    assert "schedule-off-by-steps" not in first_group(schedule, lambda n: rate)


@pytest.mark.parametrize(
    ("schedule", "begun"), [(from_zero, False), (lambda n: from_zero(max(0, n - 1)), False), (cosine, True)]
)
def test_a_rate_of_nothing_is_that_of_a_warm_up_that_has_not_begun(schedule, begun):
    said = told(schedule, lambda n: 0.0)
    names = {cause.name for cause in said}
    assert {"base-lr", "no-scheduler"} <= names
    assert ({"schedule-off-by-steps", "scheduler-per-outer-step"} <= names) is not begun
    assert not any("0 times" in cause.evidence for cause in said)


def test_a_rate_of_nothing_beside_one_that_stays_is_another():
    assert first_group(lambda n: 1e-3, lambda n: 0.0) == {"base-lr", "lr-rounded"}


@pytest.mark.parametrize("often", [2, 4, 8])
@pytest.mark.parametrize(("steps", "before"), [(4, 0), (4, 1), (8, 0), (8, 1), (12, 0), (12, 1)])
def test_a_warm_up_that_is_over_at_once_may_have_moved_often_in_each_step(steps, before, often):
    """Another warm-up rises as far in one step; the reference's is over in the last steps, or behind the record."""

    def warming(n):
        return 1e-3 * min(1.0, (n + before) / steps)

    for length in (steps // 2 + 2, steps + 2):
        sides = [[(warming(n * times),) for n in range(length)] for times in (1, often)]
        first = next(n for n in range(length) if sides[0][n] != sides[1][n])
        counts = (PASSES,) * length
        one, other = trace(sides[0], counts), trace(sides[1], counts, range(first + 1, length))
        named = {it.name for it in grouped(diagnose(one, other, compare(one, other, Tier.REASSOCIATED)).causes)[0]}
        assert named & {"scheduler-stepped-often", "scheduler-per-pass"}, (length, named)


def of_few(rates, others, passes, first=1, differs=2):
    """The causes that are named first of a record of few steps; `differs`: losses are others from this place on."""
    pair = [trace([(rate,) for rate in side], passes, off) for side, off in ((rates, ()), (others, range(differs, 9)))]
    moved = (
        Trace(it.header, tuple(one.model_copy(update={"step": first + n}) for n, one in enumerate(it.steps)))
        for it in pair
    )
    a, b = moved
    return {cause.name for cause in grouped(diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes)[0]}


def test_moves_of_often_and_of_each_pass_are_named_where_they_give_as_many_rates_as_steps_ahead_do():
    """The reference has half of the rates that are due, or all but the last: its schedule is no line."""
    stairs = [n / 3e3 for n in (1, 2, 3, 3, 1.5, 1.5, 1.5, 1.5, 0.75)]
    twice = of_few(stairs[:5], stairs[::2], [3, 3, 2, 2, 3])
    assert twice == {"schedule-off-by-steps", "scheduler-stepped-often"}
    square = [0.05 * (1 - n / 8) ** 2 for n in range(9)]
    each_pass = of_few(square[:5], [square[n] for n in (0, 2, 3, 4, 6)], [2, 1, 1, 2, 2])
    assert each_pass == {"schedule-off-by-steps", "scheduler-per-pass"}
    line = [n / 9e3 for n in (3, 6, 9, 9, 8, 7, 6, 5, 4)]
    ranks = of_few(line[1:5], line[2::2], [2, 4, 2, 3], first=2)
    assert ranks >= {"schedule-off-by-steps", "scheduler-stepped-often"}


def test_one_step_ahead_in_all_rates_is_no_scheduler_that_moves_often():
    square = [0.05 * (1 - n / 8) ** 2 for n in range(9)]
    assert of_few(square[:5], square[1:6], [2] * 5) == {"schedule-off-by-steps"}


@pytest.mark.parametrize("schedule", [linear, cosine, lambda n: 0.1 * 0.9**n])
def test_one_move_that_was_left_out_may_be_that_of_a_slower_scheduler_in_few_steps(schedule):
    due = [schedule(n) for n in range(4)]
    both = {"scheduler-per-outer-step", "schedule-off-by-steps"}
    assert of_few(due, [due[n] for n in (0, 1, 1, 2)], [2] * 4, differs=3) == both
    # More rates show which of the two it is.
    due = [schedule(n) for n in range(5)]
    assert of_few(due, [due[n] for n in (0, 1, 1, 2, 3)], [2] * 5, differs=3) == {"schedule-off-by-steps"}
    assert of_few(due, [due[n] for n in (0, 1, 1, 2, 2)], [2] * 5, differs=3) == {"scheduler-per-outer-step"}
