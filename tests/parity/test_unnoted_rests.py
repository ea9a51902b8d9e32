"""Rests that a skipped step left in a schedule, where no log tells of a skipped step; and groups that show no fault."""

import json

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from ds_parity.parity.diagnosis.schedule_shapes import _are_round
from ds_parity.trace import Trace
from ds_parity.trace.foreign import read_any
from tests.parity.test_schedule_excerpts import HEADER, exponential, first_group, inverse_root, linear, traces


def resting(schedule, at):
    """The same behind a step that was skipped: it has the rate of the step before."""
    return lambda n: schedule(n - (n > at))


def warmed(steps):
    return lambda n: min(1.0, n / steps)


@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_a_longer_warm_up_with_a_rest_in_it_is_named(at):
    named = first_group(resting(warmed(8), at), resting(warmed(16), at), steps=6)
    assert {"base-lr", "another-warm-up"} <= named


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_scheduler_that_moves_often_is_named_with_a_rest_in_it(at):
    def line(n):
        return 1 - n / 200

    named = first_group(resting(line, at), resting(lambda n: line(3 * n), at), steps=5, passes=None)
    assert {"scheduler-stepped-often", "scheduler-per-pass", "schedule-too-short"} <= named


def test_a_schedule_begins_again_where_its_first_rate_is_there_twice():
    schedule = resting(inverse_root(3), 0)
    named = first_group(schedule, lambda n: schedule(n) if n < 4 else inverse_root(3)(n - 4), steps=8)
    assert "resume-resets-schedule" in named


def test_a_warm_up_of_an_excerpt_may_have_begun_behind_skipped_steps():
    named = first_group(lambda n: (n - 1) / 40, lambda n: (n - 1) / 160, begin=4, steps=6)
    assert {"base-lr", "another-warm-up", "schedule-too-long", "scheduler-per-outer-step"} <= named


@pytest.mark.parametrize("steps", [4, 9])
def test_an_excerpt_a_step_behind_is_one_of_the_schedule_where_losses_show_too_little(steps):
    schedule = linear(2, 40)
    a, b = traces([schedule], [lambda n: schedule(n - 1)], 2, steps)
    b = Trace(HEADER, tuple(x.model_copy(update={"lr": y.lr}) for x, y in zip(a.steps, b.steps, strict=True)))
    named = {cause.name for cause in diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes}
    assert {"lr-reported-a-step-off", "schedule-off-by-steps"} <= named


def test_an_exponential_schedule_of_an_excerpt_may_have_begun_again_in_front_of_it():
    named = first_group(exponential(0), lambda n: exponential(0)(n - 7), begin=7, steps=5)
    assert {"schedule-off-by-steps", "resume-resets-schedule"} <= named


def test_an_inverse_root_behind_a_warm_up_of_one_step_is_a_factor_of_itself_in_a_whole_record():
    schedule = inverse_root(1)
    named = first_group(schedule, lambda n: schedule(2 * n), steps=6)
    assert {"base-lr", "scheduler-stepped-often", "scheduler-per-pass"} <= named
    for factor in (0.3, 1e-200):
        assert first_group(schedule, lambda n, factor=factor: factor * schedule(n), steps=6) == {"base-lr"}


@pytest.mark.parametrize(
    "faulty", [lambda n: plateau(max(0, n - 3)), lambda n: plateau(n) if n < 3 else plateau(n - 3)]
)
def test_one_rate_of_a_schedule_that_begins_with_a_rest_may_be_behind_or_begun_again(faulty):
    named = first_group(plateau, faulty, steps=6)
    assert {"no-scheduler", "schedule-off-by-steps", "resume-resets-schedule"} <= named


def plateau(n):
    return 1.0 if n < 3 else max(0.0, 1 - (n - 2) / 4)


@pytest.mark.parametrize(
    ("kept", "faulty", "begin", "names"),
    [
        (0.0, lambda n: 2 * linear(5)(n), 0, {"base-lr"}),
        (0.02, linear(5, 50), 0, {"schedule-too-short"}),
        (0.02, lambda n: inverse_root(3)(2 * n), 5, {"scheduler-stepped-often"}),
        (0.02, lambda n: 1.0, 8, {"no-scheduler"}),
    ],
)
def test_a_group_of_one_rate_shows_no_fault_of_the_schedule(kept, faulty, begin, names):
    schedule = inverse_root(3) if begin == 5 else linear(5)
    named = first_group([schedule, lambda n: kept], [faulty, lambda n: kept], begin=begin, steps=8)
    assert names <= named


def test_a_group_that_moves_and_agrees_shows_that_the_schedule_does():
    named = first_group([linear(5), inverse_root(5)], [lambda n: 2 * linear(5)(n), inverse_root(5)], begin=8)
    assert named == {"group-lr"}


def test_a_scheduler_that_moves_in_a_skipped_step_shows_it_where_its_rate_changes():
    """A schedule that goes by steps hides it until then."""

    def stairs(n):
        return 0.9 ** (n // 3)

    a, b = traces([lambda n: stairs(n - (n > 1))], [stairs], 0, 8)
    a, b = (
        Trace(HEADER, tuple(it.model_copy(update={"skipped": it.step == 2}) for it in side.steps)) for side in (a, b)
    )
    named = {cause.name for cause in diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes}
    assert {"scheduler-on-skipped-step", "schedule-off-by-steps"} <= named


@pytest.mark.parametrize(
    ("rates", "others"),
    [
        ([1e-4 * (1 - n / 5) ** 2 for n in range(5)], [1e-4 * (1 - n / 5) for n in range(5)]),
        ([0.0689058, 0.0410942, 0.0185942, 0.01, 0.01], [0.08, 0.06, 0.04, 0.02, 0]),
        ([1e-4, 4e-4, 7e-4, 1e-3], [1e-4, 4e-4, 1e-4, 4e-4]),
    ],
)
def test_rates_that_are_round_numbers_are_not_taken_for_rounded_ones(rates, others, tmp_path):
    """So that a shape predicts them to a digit, and none is named that hardly does."""
    sides = []
    for at, own in enumerate((rates, others)):
        rows = [{"loss": 1 + (7 * n % 5) * (10 + at * n) / 100, "lr": it} for n, it in enumerate(own)]
        path = tmp_path / f"{at}.jsonl"
        path.write_text("".join(json.dumps({"step": n, **row}) + "\n" for n, row in enumerate(rows, 1)))
        sides.append(read_any(path))
    named = {cause.name for cause in diagnose(*sides, compare(*sides, Tier.REASSOCIATED)).causes}
    assert not named & {"another-lowest-lr", "another-highest-lr", "schedule-too-long"}


def test_two_skipped_steps_in_which_a_scheduler_moves_are_named():
    def late(n):
        return 1.0 if n < 6 else max(0.0, 1 - (n - 6) / 20)

    a, b = traces([lambda n: late(n - (n > 1) - (n > 2))], [late], 0, 20)
    a, b = (
        Trace(HEADER, tuple(it.model_copy(update={"skipped": it.step in (2, 3)}) for it in side.steps))
        for side in (a, b)
    )
    named = {cause.name for cause in diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes}
    assert {"scheduler-on-skipped-step", "schedule-off-by-steps"} <= named


@pytest.mark.parametrize("begin", [0, 9])
def test_one_rate_alone_that_is_not_0_names_no_cause(begin):
    assert not first_group(lambda n: (n > begin) / 8, lambda n: (n > begin) / 4, begin=begin, steps=2)


def test_a_rate_that_rests_behind_a_warm_up_is_no_rounded_one_for_certain():
    def warmed_line(n):
        return (n + 1) / 4 if n < 4 else 1 - (n - 3) / 30000

    named = first_group(warmed_line, lambda n: min(1.0, (n + 1) / 4), steps=12)
    assert {"lr-rounded", "no-scheduler", "schedule-too-long"} <= named


def test_rates_of_few_digits_that_stand_still_are_no_round_numbers():
    rates = [round(1e-3 * (1 - n / 333), 5) for n in range(12)]
    assert not _are_round(rates, 0.5e-5)
    assert _are_round([1e-3 * (1 - n / 100) for n in range(12)], 0.5e-5)
