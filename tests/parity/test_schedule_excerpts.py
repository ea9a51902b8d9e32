"""Schedules of which a part is recorded: what came before it leaves the same rates as faults that are in it."""

import math

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace

PEAK = 1e-3
NOTHING = dict.fromkeys(("passes", "idle_passes", "rollouts")) | dict.fromkeys(("prompts", "tokens", "total"))
HEADER = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=1, config_hash="ab", engine="other")


def linear(warm_up, end=100, lowest=0.0):
    return lambda n: n / warm_up if n < warm_up else max(lowest, (end - n) / (end - warm_up))


def squared(warm_up, end=100):
    return lambda n: n / warm_up if n < warm_up else ((end - n) / (end - warm_up)) ** 2


def inverse_root(warm_up):
    return lambda n: n / warm_up if n < warm_up else math.sqrt(warm_up / n)


def exponential(warm_up):
    return lambda n: n / warm_up if n < warm_up else 0.95 ** (n - warm_up)


def cosine(warm_up, end=100, lowest=0.0):
    return lambda n: (
        n / warm_up
        if n < warm_up
        else lowest + (1 - lowest) * (1 + math.cos(math.pi * min(1, (n - warm_up) / (end - warm_up)))) / 2
    )


def stairs(each):
    return lambda n: 0.5 ** (n // each)


def traces(schedules, faulty, begin, steps, passes=3):
    """A run, and one whose losses and norms are others behind the first rate that is; a schedule for each group."""
    sides, apart = ([], []), False
    for n in range(begin, begin + steps):
        rates = [tuple(PEAK * schedule(n) for schedule in side) for side in (schedules, faulty)]
        for side, of in zip(sides, rates, strict=True):
            off = 1 + 0.01 * (1 + 0.3 * math.sin(7 * n)) * (apart and side is sides[1])
            counts = {"passes": passes, "idle_passes": 0, "rollouts": 16, "prompts": 4, "tokens": 900, "total": 900.0}
            side.append(StepRecord(step=n + 1, loss=(2 - n / 99) * off, lr=of, grad_norm=off * (1 + n / 50), **counts))
        apart = apart or rates[0] != rates[1]
    return [Trace(HEADER, tuple(side)) for side in sides]


def first_group(schedule, faulty, begin=0, steps=12, passes=3):
    """The names of the likeliest causes; functions of the step, or lists of one for each parameter group."""
    sides = [it if isinstance(it, list) else [it] for it in (schedule, faulty)]
    a, b = traces(*sides, begin, steps, passes)
    groups = grouped(diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes)
    return {cause.name for cause in groups[0]} if groups else set()


def test_a_factor_that_another_warm_up_leaves_behind_it_is_no_base_rate_for_certain():
    made = [(make(10), make(4)) for make in (linear, squared, inverse_root, exponential)]
    assert [{"base-lr", "another-warm-up"} <= first_group(*pair, begin=20) for pair in made] == [True] * 4


@pytest.mark.parametrize("moves", [2, 3])
def test_an_inverse_root_at_another_pace_is_a_factor_of_itself(moves):
    schedule = inverse_root(5)
    named = first_group(schedule, lambda n: schedule(moves * n), begin=15)
    assert {"base-lr", "scheduler-stepped-often", "scheduler-per-pass"} <= named
    assert not named & {"schedule-too-long", "no-scheduler"}
    slower = first_group(schedule, lambda n: schedule(n / moves), begin=60)
    assert {"base-lr", "schedule-too-long"} <= slower
    assert "scheduler-stepped-often" not in slower


@pytest.mark.parametrize("by", [2, 30])
def test_an_exponential_schedule_at_another_step_is_a_factor_of_itself(by):
    schedule = exponential(5)
    assert {"base-lr", "schedule-off-by-steps"} <= first_group(schedule, lambda n: schedule(n + by), begin=15)


def test_a_factor_that_no_part_before_leaves_is_one_of_the_base_rate():
    schedule = cosine(5)
    assert first_group(schedule, lambda n: 0.3 * schedule(n), begin=15) == {"base-lr"}


@pytest.mark.parametrize("begin", [15, 30])
def test_where_both_schedules_rest_in_the_record_it_is_open_why(begin):
    named = first_group(lambda n: 0.1, lambda n: 1.0, begin=begin)
    assert {"base-lr", "no-scheduler", "another-lowest-lr", "schedule-too-long"} <= named
    assert {"base-lr", "schedule-off-by-steps"} <= first_group(stairs(5), lambda n: stairs(5)(n + 5), begin=begin)


@pytest.mark.parametrize(
    ("faulty", "name"),
    [
        (lambda n: 1.0, "no-scheduler"),
        (linear(5, 60, lowest=0.9), "another-lowest-lr"),
        (lambda n: linear(5)(n // 40), "scheduler-per-outer-step"),
        (lambda n: linear(5)(3 * n), "scheduler-per-pass"),
        (linear(5, 30), "schedule-too-short"),
        (lambda n: linear(5)(n + 80), "schedule-off-by-steps"),
    ],
)
def test_one_rate_in_an_excerpt_is_that_of_any_schedule_which_rests(faulty, name):
    assert name in first_group(linear(5), faulty, begin=40)


def test_a_share_of_the_way_to_a_lowest_rate_may_come_of_another_warm_up():
    assert "another-warm-up" in first_group(linear(10, lowest=0.0), linear(3, lowest=0.0), begin=20)

    def to_a_tenth(warm_up):
        return lambda n: 0.1 + 0.9 * squared(warm_up)(n)

    assert {"another-highest-lr", "another-warm-up"} <= first_group(to_a_tenth(10), to_a_tenth(3), begin=90, steps=15)


def test_how_many_passes_came_before_an_excerpt_is_not_known():
    named = first_group(linear(5, 20), lambda n: linear(5, 20)(3 * n), begin=5, steps=4)
    assert {"scheduler-per-pass", "scheduler-stepped-often"} <= named
    assert "scheduler-per-pass" not in first_group(linear(5, 20), lambda n: linear(5, 20)(3 * n), begin=5, passes=1)


def test_a_factor_in_a_warm_up_that_goes_on_may_be_one_of_its_length():
    def from_one(steps):
        return lambda n: min(1.0, (n + 1 - (n > 2)) / steps)

    assert {"base-lr", "another-warm-up"} <= first_group(from_one(20), from_one(30), steps=6)  # with a rest in the log
    assert first_group(from_one(4), lambda n: 0.3 * from_one(4)(n), steps=8) == {"base-lr"}


@pytest.mark.parametrize("make", [linear, cosine, exponential])
def test_a_schedule_without_a_warm_up_that_is_twice_at_its_highest_rate_is_named(make):
    warmed = make(5)
    named = first_group(lambda n: min(1.0, (n + 1) / 5) * (warmed(n) if n > 5 else 1), lambda n: warmed(n + 5))
    assert {"another-warm-up", "schedule-off-by-steps"} <= named


def test_rates_that_have_come_to_nothing_do_not_rise():
    named = first_group(exponential(3), lambda n: exponential(3)(n + 400), steps=8)
    assert "another-warm-up" not in named


@pytest.mark.parametrize("make", [linear, cosine, inverse_root, exponential])
@pytest.mark.parametrize("factor", [0.1, 2.0])
def test_exchanged_rates_of_parameter_groups_are_those_of_no_schedule(make, factor):
    pair = [make(5), lambda n: factor * make(5)(n)]
    assert first_group(pair, pair[::-1], steps=8) == {"group-lr"}


def test_a_resumed_run_ahead_of_a_warm_up_may_be_at_the_rate_to_which_it_rises():
    named = first_group(lambda n: (n + 1) / 5, lambda n: 0.2 if n < 1 else 1.0, steps=4)
    assert {"another-warm-up", "schedule-off-by-steps"} <= named


@pytest.mark.parametrize("growth", [1.3, 2.5, 7.0])
@pytest.mark.parametrize("begins", [1, 2, 5])
def test_losses_that_grow_without_end_do_not_come_back(growth, begins):
    one = [2 + 0.02 * math.sin(9 * n) + 0.01 * growth**n for n in range(12)]
    other = one[:begins] + [2 + 0.02 * math.sin(5 * n) + 0.01 * 1.1**n for n in range(begins, 12)]
    for losses in ((one, other), (other, one)):
        a, b = (
            Trace(
                HEADER,
                tuple(
                    StepRecord(step=n + 1, loss=it, lr=(1e-3,), grad_norm=None, **NOTHING) for n, it in enumerate(side)
                ),
            )
            for side in losses
        )
        assert not diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes


def rising(n):
    """A warm-up along a cosine, and beside it one that a square root of steps is of."""
    return (1 - math.cos(math.pi * (n + 1) / 20)) / 2


@pytest.mark.parametrize("schedule", [rising, lambda n: 0.1 + 0.9 * rising(n), lambda n: 1 - 0.5 ** (n + 1)])
def test_a_factor_in_a_rise_that_is_no_line_from_0_is_one_of_the_base_rate(schedule):
    assert first_group(schedule, lambda n: 0.5 * schedule(n)) == {"base-lr"}


@pytest.mark.parametrize(
    ("schedule", "beside"),
    [
        (linear(5, 28), {"another-warm-up"}),
        (lambda n: min(1.0, (40 - n) / 15), set()),
        (stairs(5), {"another-warm-up", "schedule-off-by-steps", "resume-resets-schedule"}),
        (lambda n: cosine(5)(n - (n > 26)), set()),
        (lambda n: linear(5)(n - (n > 26)), {"another-warm-up"}),
    ],
)
def test_a_rest_within_an_excerpt_leaves_open_what_its_schedule_does(schedule, beside):
    assert first_group(schedule, lambda n: 0.3 * schedule(n), begin=20) == {"base-lr", *beside}


@pytest.mark.parametrize("power", [0.9, 1.5, 2.5, -0.7])
@pytest.mark.parametrize("digits", [None, 7])
def test_a_power_of_the_steps_may_have_another_warm_up_whatever_it_is(power, digits):
    def made(warm_up):
        def rate(n):
            if power < 0:
                return (n / warm_up) ** power
            return ((100 - n) / (100 - warm_up)) ** power

        return rate if digits is None else lambda n: float(f"{rate(n):.{digits}g}")

    assert {"base-lr", "another-warm-up"} <= first_group(made(10), made(4), begin=20)


def test_two_rates_are_of_any_curve():
    schedule = inverse_root(5)
    named = first_group(schedule, lambda n: schedule(2 * n), begin=15, steps=2)
    assert {"base-lr", "scheduler-stepped-often", "another-warm-up", "schedule-off-by-steps"} <= named
    assert "schedule-too-long" not in named


def test_one_rate_above_those_of_a_schedule_that_falls_is_not_its_end():
    named = first_group(linear(5), lambda n: 1.0, begin=40)
    assert {"no-scheduler", "another-lowest-lr", "schedule-too-long", "schedule-off-by-steps"} <= named
    assert not named & {"schedule-too-short", "scheduler-stepped-often", "scheduler-per-pass"}
    below = first_group(linear(5), lambda n: 0.01, begin=40)
    assert {"no-scheduler", "schedule-too-short", "scheduler-stepped-often"} <= below
    assert not below & {"another-lowest-lr", "schedule-too-long"}


@pytest.mark.parametrize(("moves", "passes"), [(2, 3), (3, 4)])
def test_what_came_before_an_excerpt_changes_no_number_of_moves_in_it(moves, passes):
    schedule = linear(5, 200)
    named = first_group(schedule, lambda n: schedule(20 + moves * (n - 20)), begin=20, passes=passes)
    assert "scheduler-stepped-often" in named
    assert "scheduler-per-pass" not in named


def test_passes_that_no_log_holds_may_be_as_many_as_the_moves():
    named = first_group(linear(2, 40), lambda n: linear(2, 40)(4 * n), steps=8, passes=None)
    assert {"scheduler-per-pass", "scheduler-stepped-often"} <= named


@pytest.mark.parametrize("of_log", [False, True])
def test_rates_that_are_exchanged_in_the_log_alone_are_logged_wrong(of_log):
    pair = [linear(5), lambda n: 0.1 * linear(5)(n)]
    a, b = traces(pair, pair[::-1], 0, 8)
    if of_log:
        b = Trace(HEADER, tuple(x.model_copy(update={"lr": y.lr}) for x, y in zip(a.steps, b.steps, strict=True)))
    groups = grouped(diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes)
    assert {cause.name for cause in groups[0]} == {"group-lr", *(("reported-lr",) if of_log else ())}


def test_groups_that_a_step_exchanges_may_be_a_step_off():
    pair = [lambda n: 1.0 if n % 2 else 0.5, lambda n: 0.5 if n % 2 else 1.0]
    assert {"group-lr", "schedule-off-by-steps"} <= first_group(pair, [lambda n, it=it: it(n + 1) for it in pair])


def test_groups_that_keep_their_places_are_not_exchanged_by_rounding():
    pair = [linear(5), lambda n: 0.1 * linear(5)(n)]
    rounded = [lambda n, it=it: it(n) * (1 + 3e-16) for it in pair]
    assert "group-lr" not in first_group(pair, rounded)


def counted(losses, tokens):
    steps = enumerate(zip(losses, tokens, strict=True), 1)
    return Trace(
        HEADER,
        tuple(
            StepRecord(step=n, loss=loss, lr=(1e-3,), grad_norm=None, **NOTHING | {"tokens": held})
            for n, (loss, held) in steps
        ),
    )


TOKENS, OTHERS = [900, 700, 800, 950], [820, 910, 640, 700]


@pytest.mark.parametrize(
    ("one", "later"),
    [
        ([1, 1.5, 2, 2.5, 3.1, 0.4, 2.9, 0.6], [0.99, 1.49, 1.98, 2.48]),
        ([2, 2.02, 2.01, 2, 3.1, 3.4, 2.9, 3.6], [1.99, 2, 1.97, 1.98]),
    ],
)
def test_counts_that_come_again_prove_that_the_data_do(one, later):
    pair = counted(one, [*TOKENS, *OTHERS]), counted(one[:4] + later, 2 * TOKENS)
    found = diagnose(*pair, compare(*pair, Tier.REASSOCIATED)).causes
    assert [cause.name for cause in found] == ["resume-repeats-data"]


@pytest.mark.parametrize("at", [slice(4, 8), slice(4, 5), slice(5, 6)])
def test_what_is_no_number_does_not_come_back(at):
    one = [1, 1.5, 2, 2.5, 3.1, 0.4, 2.9, 0.6]
    losses = [math.nan if n in range(8)[at] else loss for n, loss in enumerate([*one[:4], 0.99, 1.49, 1.98, 2.48])]
    pair = counted(one, [*TOKENS, *OTHERS]), counted(losses, 2 * TOKENS)
    assert not diagnose(*pair, compare(*pair, Tier.REASSOCIATED)).causes


def test_counts_of_a_second_epoch_are_no_proof():
    """A run that stops to learn has the losses of its first epoch in the second."""
    one = [2, 2.02, 2.01, 2, 1.2, 1.25, 1.1, 1.0]
    pair = counted(one, 2 * TOKENS), counted([*one[:4], 1.99, 2, 1.97, 1.98], 2 * TOKENS)
    assert not diagnose(*pair, compare(*pair, Tier.REASSOCIATED)).causes


def logarithmic(steps):
    """DeepSpeed's WarmupLR (runtime/lr_schedules.py)."""
    return lambda n: min(1.0, math.log(n + 1) / math.log(steps))


@pytest.mark.parametrize(
    ("made", "begin", "steps"),
    [
        (logarithmic, 0, 12),
        (logarithmic, 10, 8),
        (lambda steps: lambda n: ((n + 1) / steps) ** 2, 0, 12),
        (lambda steps: lambda n: (n + 1) / steps, 0, 2),
    ],
)
def test_a_factor_in_a_warm_up_of_any_shape_may_be_one_of_its_length(made, begin, steps):
    assert {"base-lr", "another-warm-up"} <= first_group(made(30), made(60), begin=begin, steps=steps)


@pytest.mark.parametrize(("moves", "passes"), [(2, 5), (3, 3), (4, 4)])
def test_in_an_excerpt_many_moves_may_be_a_shorter_schedule(moves, passes):
    schedule = linear(5, 200)
    named = first_group(schedule, lambda n: schedule(moves * n), begin=20, passes=passes)
    assert "schedule-too-short" in named
    assert named & {"scheduler-stepped-often", "scheduler-per-pass"}


def test_a_rest_is_one_give_or_take_rounding():
    noise = [1, 1 + 2**-52, 1, 1, 1 + 2**-52, 1]
    named = first_group(lambda n: noise[n - 20], lambda n: noise[n - 20] / 2, begin=20, steps=6)
    assert {"base-lr", "no-scheduler", "schedule-too-short", "another-lowest-lr"} <= named


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rates",
    [(1, 0.5, 1e-300, 0), (1e-300, 1e-200, 1), (1 + 1e-12, 1, 1 + 5e-13, 1 + 1e-12, 1, 1 + 1e-12), (1e-320,) * 4],
)
@pytest.mark.parametrize("begin", [0, 20])
def test_rates_of_any_size_raise_nothing(rates, begin):
    first_group(lambda n: rates[n - begin], lambda n: rates[n - begin] / 2, begin=begin, steps=len(rates))


def test_tokens_that_come_again_show_the_data_however_far_weights_have_moved():
    losses = [1.98, 1.84, 1.66, 1.61, 1.31, 1.3, 1.26, 1.23]
    pair = counted(losses, [*TOKENS, *OTHERS]), counted([*losses[:4], 1.35, 1.31, 1.21, 1.21], 2 * TOKENS)
    (cause,) = diagnose(*pair, compare(*pair, Tier.REASSOCIATED)).causes
    assert (cause.name, "have the tokens of step 1" in cause.evidence) == ("resume-repeats-data", True)


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("end", [20, 60])
@pytest.mark.parametrize("lowest", [0.07, 0.3])
def test_a_line_whose_highest_rate_lies_in_front_of_an_excerpt_may_end_higher(lowest, end, each):
    sides = [lambda n, low=low: 1 - (1 - low) * (n // each) / end for low in (0.0, lowest)]
    assert {"schedule-too-long", "another-lowest-lr"} <= first_group(*sides, begin=each, steps=each * 12)
