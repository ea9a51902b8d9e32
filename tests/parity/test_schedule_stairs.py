"""Schedules that go by stairs, as torch's StepLR: their length, and their place, are read off the moves."""

import random

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace

COUNTS = {"idle_passes": 0, "rollouts": 16, "prompts": 4, "tokens": 900, "total": 900.0}


def stairs(period, *, late=0, factor=0.5):
    return lambda n: 0.05 * factor ** max(0, (n - late) // period)


def first_group(schedule, faulty, steps, *, start=0, passes=2):
    """The causes that are named first of runs whose losses part behind the first rate that is another."""
    header = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=1, config_hash="ab", engine="other")
    other = next(n for n in range(start, steps) if schedule(n) != faulty(n))
    sides = []
    for rate, off in ((schedule, 0.0), (faulty, 0.01)):
        draw = random.Random(1)
        records = []
        for n in range(start, steps):
            loss = 2 - 0.03 * n + 0.1 * draw.random() + off * (n > other)
            figures = {"loss": loss, "lr": (rate(n),), "grad_norm": 1 + draw.random() + off * (n > other)}
            records.append(StepRecord(step=n + 1, **figures, passes=passes, **COUNTS))
        sides.append(Trace(header, tuple(records)))
    causes = diagnose(*sides, compare(*sides, Tier.REASSOCIATED)).causes
    return {cause.name for cause in grouped(causes)[0]} if causes else set()


@pytest.mark.parametrize(
    ("period", "other", "steps", "beside"),
    [
        (15, 10, 40, set()),
        (3, 2, 8, set()),
        (4, 3, 20, set()),
        # A schedule that is two steps ahead from step 5 on has the same twelve rates.
        (5, 4, 12, {"schedule-off-by-steps"}),
        (5, 4, 20, set()),
        (6, 3, 20, {"scheduler-stepped-often", "scheduler-per-pass"}),
        (9, 3, 30, {"scheduler-stepped-often"}),
    ],
)
@pytest.mark.parametrize("late", [0, 1])
def test_shorter_stairs_are_a_schedule_that_is_too_short(period, other, steps, beside, late):
    """Rates that the reference's record does not come to follow from its stairs: they go on."""
    named = first_group(stairs(period, late=late), stairs(other, late=late), steps + late)
    assert named == {"schedule-too-short"} | (beside & {"schedule-off-by-steps"} if late else beside)


@pytest.mark.parametrize("factor", [0.5, 0.1, 2.0])
@pytest.mark.parametrize(("first", "by", "steps"), [(10, 5, 40), (5, 3, 20), (4, 1, 20)])
def test_stairs_that_are_ahead_from_a_step_on_are_no_shorter_ones(first, by, steps, factor):
    """The rates behind the record of the reference are those of its stairs."""
    schedule = stairs(5, factor=factor)
    named = first_group(schedule, lambda n: schedule(n + by * (n >= first)), steps)
    assert "schedule-off-by-steps" in named
    assert "schedule-too-short" not in named


@pytest.mark.parametrize("by", [1, 2, 7, -2])
@pytest.mark.parametrize("start", [0, 4])
def test_stairs_at_another_place_are_named_however_far_they_are_off(by, start):
    """Of a trace that begins in the middle, the steps before are not recorded."""
    schedule = stairs(4)
    named = first_group(schedule, lambda n: schedule(n - by), 24, start=start)
    assert "schedule-off-by-steps" in named
    assert not {"schedule-too-long", "schedule-too-short"} & named


@pytest.mark.parametrize(("period", "other"), [(4, 6), (5, 10), (10, 12)])
def test_longer_stairs_are_a_schedule_that_is_too_long(period, other):
    named = first_group(stairs(period), stairs(other), 40)
    assert "schedule-too-long" in named
    assert ("scheduler-per-outer-step" in named) is (other % period == 0)


def uneven(n):
    return 0.05 * 0.5 ** sum(n >= at for at in (3, 7, 9))


def test_stairs_of_uneven_lengths_and_factors_have_no_period():
    assert first_group(uneven, stairs(4), 24) == set()
    assert first_group(lambda n: 0.05 * (1, 0.5, 0.1, 0.09)[min(3, n // 5)], stairs(4), 20) == set()


def test_a_scheduler_that_stops_on_stairs_has_no_other_length_of_them():
    assert first_group(stairs(4), lambda n: stairs(4)(min(n, 5)), 20) == set()


def test_one_move_to_a_rate_at_which_the_reference_rests_shows_no_period():
    """Longer stairs give it, of which this trace begins in the middle."""
    later = first_group(stairs(5), stairs(10), 20, start=4, passes=3)
    assert later == {"schedule-too-long", "scheduler-per-outer-step"}
    # Without even stairs none of the lengths of both is known.
    assert first_group(lambda n: max(stairs(5)(n), 0.01), stairs(10), 20, start=4) == set()


def resting(n):
    """DeepSpeed's schedulers begin with the rate of step 0 twice, and some go on by steps of one length."""
    return 0.05 - 0.002 * max(0, n - 1)


@pytest.mark.parametrize("steps", [5, 6])
def test_one_move_to_a_rate_at_which_the_reference_does_not_rest_shows_a_period(steps):
    """In the sixth step a schedule that is two steps behind would move once more."""
    behind = {"schedule-off-by-steps", "resume-resets-schedule"} if steps == 5 else set()
    assert first_group(resting, lambda n: resting(n // 2), steps) == {"scheduler-per-outer-step"} | behind


@pytest.mark.parametrize(("schedule", "beside"), [(stairs(3), {"schedule-too-long"}), (uneven, set())])
def test_one_move_of_stairs_that_are_far_behind_may_be_that_of_a_slower_scheduler(schedule, beside):
    named = first_group(schedule, lambda n: schedule(max(0, n - 7)), 12)
    assert named == {"schedule-off-by-steps", "scheduler-per-outer-step"} | beside


@pytest.mark.parametrize("by", [3, 7, 12])
def test_a_schedule_that_rests_at_first_may_be_behind_by_more_than_the_rest(by):
    """No place in the record of the reference has its first rate for as long."""

    def schedule(n):
        return 0.05 - 0.002 * max(0, n - 5)

    assert "schedule-off-by-steps" in first_group(schedule, lambda n: schedule(n - by), 22)


@pytest.mark.parametrize("other", [2, 3])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("steps", [5, 12])
@pytest.mark.parametrize("factor", [0.5, 0.9])
def test_stairs_of_several_steps_beside_an_exponential_schedule_are_too_long(other, late, steps, factor):
    """A rate that moves in every step goes by stairs of one step, which a slower scheduler makes longer, too."""
    schedules = (stairs(period, late=late, factor=factor) for period in (1, other))
    named = first_group(*schedules, steps + late, passes=5)
    once = {"schedule-off-by-steps"} if (other, steps) == (3, 5) and not late else set()
    assert named - once == {"schedule-too-long", "scheduler-per-outer-step"}


@pytest.mark.parametrize("schedule", [lambda n: 0.05 / (n + 1), lambda n: 0.05 - 0.002 * n])
def test_a_scheduler_that_moves_every_second_step_of_no_stairs_is_no_longer_schedule(schedule):
    assert first_group(schedule, lambda n: schedule(n // 2), 12, passes=5) == {"scheduler-per-outer-step"}


@pytest.mark.parametrize("by", [1, -1, 3])
def test_an_exponential_schedule_at_another_place_has_stairs_of_no_other_length(by):
    schedule = stairs(1, factor=0.9)
    named = first_group(schedule, lambda n: schedule(max(0, n + by)), 12, passes=5)
    assert "schedule-off-by-steps" in named
    assert not {"schedule-too-long", "schedule-too-short"} & named
