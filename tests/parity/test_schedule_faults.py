"""Schedules of every shape with a fault put in: the first causes named contain it, or none is named."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, Precision, StepRecord, Trace

Schedule = Callable[[float], float]
PEAK, PASSES, RESUMED = 1e-3, 4, 9
LENGTHS = (12, 17, 26)


def warmed(shape: Schedule, steps: float, lowest: float = 0.0) -> Schedule:
    """A rise from the lowest rate, and the shape behind it."""
    return lambda n: shape(n - steps) if n >= steps else lowest + (1 - lowest) * n / steps


def one_cycle(n: float) -> float:
    return 0.1 + 0.9 * n / 10 if n < 10 else max(0.01, 1 - 0.99 * (n - 10) / 20)


SHAPES: dict[str, Schedule] = {
    "constant": lambda n: 1.0,
    "linear": lambda n: max(0.0, 1 - n / 40),
    "cosine": lambda n: 0.5 * (1 + math.cos(math.pi * min(1.0, n / 40))),
    "short cosine": lambda n: 0.5 * (1 + math.cos(math.pi * min(1.0, n / 16))),
    "steps": lambda n: 0.5 ** (n // 5),
    "polynomial": lambda n: max(0.0, 1 - n / 40) ** 2,
    "exponential": lambda n: 0.9**n,
    "inverse root": lambda n: 1 / math.sqrt(n + 1),
    "restarts": lambda n: 0.5 * (1 + math.cos(math.pi * (n % 7) / 7)),
    "one cycle": one_cycle,
}
WARM = {"constant": 6, "linear": 5, "cosine": 4, "exponential": 3, "inverse root": 5, "polynomial": 6}


def from_one(shape: Schedule, steps: float) -> Schedule:
    """A warm-up whose first step is not at 0."""
    return lambda n: min(1.0, (n + 1) / steps) * shape(max(0.0, n + 1 - steps))


SCHEDULES = (
    SHAPES
    | {f"warm-up and {name}": warmed(SHAPES[name], steps) for name, steps in WARM.items()}
    | {f"warm-up from one and {name}": from_one(SHAPES[name], steps) for name, steps in WARM.items()}
)


def faults(name: str, schedule: Schedule):
    """What it makes of the schedule, and the causes that are the fault."""
    late = {"schedule-off-by-steps"}
    # These have the same numbers: 1 / sqrt(4 n + 4), and a constant that is another by a factor or by a summand.
    of_roots, constant = ({"base-lr"} if name == it else set() for it in ("inverse root", "constant"))
    yield "a step late", lambda n: schedule(max(0, n - 1)), late
    yield "a step early", lambda n: schedule(n + 1), late
    yield "ahead from a resume on", lambda n: schedule(n + 2 * (n >= RESUMED)), late
    yield "twice as fast", lambda n: schedule(2 * n), {"scheduler-stepped-often"}
    yield "per pass", lambda n: schedule(PASSES * n), {"scheduler-per-pass"}
    yield "per pass, the last of them", lambda n: schedule(PASSES * n + PASSES - 1), {"scheduler-per-pass"} | of_roots
    for times in (2, 1.5):
        yield f"too long by {times}", lambda n, times=times: schedule(n / times), {"schedule-too-long"}
    yield "in passes", lambda n: schedule(n / PASSES), {"scheduler-budget-in-passes"}
    yield "every second step", lambda n: schedule(n // 2), {"scheduler-per-outer-step"}
    yield "another rate", lambda n: 0.3 * schedule(n), {"base-lr"}
    yield "another lowest rate", lambda n: 0.2 + 0.8 * schedule(n), {"another-lowest-lr"}
    yield "another rate and lowest rate", lambda n: 0.21 + 0.43 * schedule(n), constant
    yield "added", lambda n: schedule(n) + 0.1, constant
    yield "squared", lambda n: schedule(n) ** 2, set()
    yield "a floor", lambda n: max(0.4, schedule(n)), set()
    yield "begun again", lambda n: schedule(n - RESUMED * (n >= RESUMED)), {"resume-resets-schedule"}
    yield "at rest", lambda n: 1.0, {"no-scheduler"}
    made, _, base = name.rpartition(" and ")
    if made:
        make, shape, steps = (from_one if "one" in made else warmed), SHAPES[base], WARM[base]
        own = {"another-warm-up"}
        yield "no warm-up", shape, own
        yield "half the warm-up", make(shape, steps / 2), own
        yield "more warm-up", make(shape, steps + 3), own
        yield "twice the warm-up", make(shape, 2 * steps), own | {"schedule-too-long"}
        yield "the decay alone too long", make(lambda n: shape(n / 2), steps), {"schedule-too-long"}
        if make is warmed:
            yield "another start of warm-up", make(shape, steps, 0.5), {"another-lowest-lr"}


CASES = [
    pytest.param(schedule, faulty, right, id=f"{name}, {fault}")
    for name, schedule in SCHEDULES.items()
    for fault, faulty, right in faults(name, schedule)
]


def traces(schedule: Schedule, faulty: Schedule, steps: int) -> tuple[Trace, Trace]:
    """A run, and one with the same losses up to the first rate that is another."""
    draw = random.Random(steps)
    header = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=1, config_hash="ab", engine="other")
    counts = {"passes": PASSES, "idle_passes": 0, "rollouts": 16, "prompts": 4, "tokens": 900, "total": 900.0}
    sides: tuple[list[StepRecord], list[StepRecord]] = ([], [])
    apart = 0.0
    for n in range(steps):
        loss, norm = 2 - 0.03 * n + 0.1 * draw.random(), 1 + draw.random()
        rates = PEAK * schedule(n), PEAK * faulty(n)
        for side, rate, by in zip(sides, rates, (0.0, apart), strict=True):
            off = 1 + by * draw.random()
            side.append(StepRecord(step=n + 1, loss=loss * off, lr=(rate,), grad_norm=norm * off, **counts))
        apart = 0.01 if abs(rates[0] - rates[1]) > 1e-12 else apart
    return Trace(header, tuple(sides[0])), Trace(header, tuple(sides[1]))


def named(schedule: Schedule, faulty: Schedule, steps: int) -> list[set[str]]:
    a, b = traces(schedule, faulty, steps)
    found = compare(a, b, Tier.REASSOCIATED)
    return [] if found.equal else [{cause.name for cause in group} for group in grouped(diagnose(a, b, found).causes)]


# The longer ones take most of the time.
@pytest.mark.parametrize("steps", [LENGTHS[0], *(pytest.param(it, marks=pytest.mark.slow) for it in LENGTHS[1:])])
@pytest.mark.parametrize(("schedule", "faulty", "right"), CASES)
def test_the_first_causes_of_another_schedule_contain_the_fault(schedule, faulty, right, steps):
    groups = named(schedule, faulty, steps)
    assert not groups or groups[0] & right, groups


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_a_lowest_rate_is_no_schedule_that_is_too_long_unless_this_has_the_same_rates(name):
    """It has where a schedule is one line from its highest rate on."""
    schedule = SCHEDULES[name]
    (group,) = named(schedule, lambda n: 0.2 + 0.8 * schedule(n), 17)
    assert group == {"another-lowest-lr"} | ({"schedule-too-long"} if name == "linear" else set())


@pytest.mark.parametrize("name", ["cosine", "short cosine", "polynomial", "exponential", "steps", "one cycle"])
@pytest.mark.parametrize("times", [2, 1.5])
def test_a_curve_that_is_too_long_is_named(name, times):
    """What it predicts lies between steps of the reference."""
    schedule = SCHEDULES[name]
    assert "schedule-too-long" in named(schedule, lambda n: schedule(n / times), 17)[0]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name.startswith("warm-up and ") and "root" not in name])
def test_a_decay_that_is_too_long_behind_the_same_warm_up_is_named(name):
    base = name.removeprefix("warm-up and ")
    if base != "constant":
        groups = named(SCHEDULES[name], warmed(lambda n: SHAPES[base](n / 2), WARM[base]), 26)
        # A line that ends later is also one that ends higher.
        assert groups == [{"schedule-too-long"} | ({"another-lowest-lr"} if base == "linear" else set())]


@pytest.mark.parametrize("base", WARM.keys() - {"constant", "linear"})
def test_another_lowest_rate_behind_the_same_warm_up_is_named(base):
    def ends_higher(n):
        return 0.2 + 0.8 * SHAPES[base](n)

    groups = named(SCHEDULES[f"warm-up and {base}"], warmed(ends_higher, WARM[base]), 26)
    assert groups == [{"another-lowest-lr"}]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_a_factor_in_all_rates_is_named_alone(name):
    schedule = SCHEDULES[name]
    assert named(schedule, lambda n: 0.3 * schedule(n), 17) == [{"base-lr"}]


@pytest.mark.parametrize("make", [warmed, from_one])
@pytest.mark.parametrize("steps", [2, 3, 4, 9, 12])
def test_another_warm_up_to_a_constant_rate_is_named(make, steps):
    found = named(make(SHAPES["constant"], 6), make(SHAPES["constant"], steps), 17)
    assert "another-warm-up" in found[0]


@pytest.mark.parametrize("make", [warmed, from_one])
@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
def test_a_schedule_without_its_warm_up_is_one_that_is_ahead_or_has_none(make, name):
    found = named(make(SHAPES[name], 5), SHAPES[name], 17)
    assert found == [{"schedule-off-by-steps", "another-warm-up"}]


@pytest.mark.parametrize(
    ("slope", "beside"),
    [(0.03, {"schedule-too-long"}), (0.1, {"scheduler-stepped-often", "schedule-too-short"}), (0.07, set())],
)
def test_of_a_warm_up_that_goes_on_neither_its_end_nor_its_highest_rate_is_known(slope, beside):
    """Both start at half of the highest rate."""
    found = named(lambda n: 0.5 + 0.05 * n, lambda n: 0.5 + slope * n, 5)
    assert found == [{"another-warm-up", "another-highest-lr", *beside}]


@pytest.mark.parametrize("name", ["cosine", "polynomial", "restarts", "one cycle"])
def test_another_highest_rate_is_named_where_the_lowest_is_recorded(name):
    lowest = min(SCHEDULES[name](n) for n in range(17))
    schedule = lambda n: 0.1 + SCHEDULES[name](n) - lowest  # noqa: E731
    (group,) = named(schedule, lambda n: 0.1 + 0.7 * (schedule(n) - 0.1), 17)
    assert group == {"another-highest-lr"}


@pytest.mark.parametrize("falls", [True, False])
@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize(("base", "decimals"), [(2e-2, 2), (2e-4, 4), (2e-5, 5), (3e-5, 5), (2e-6, 6)])
def test_digits_leave_no_other_highest_rate_open_that_they_contradict(base, decimals, each, falls):
    """A warm-up that rests at its second rate: decimals leave open half a unit of each, and no three."""
    rates = [round(base * min(n + 1, 5), 12) for n in range(16)]
    if falls:
        rates[13:] = [rates[12] * share for share in (0.775, 0.55, 0.325)]
    sides = [lambda n: rates[n // each] / PEAK, lambda n: rates[min(n // each, 1)] / PEAK]
    assert not any(
        "another-highest-lr" in group for group in in_decimals(sides, [None if falls else decimals, decimals])
    )


@pytest.mark.parametrize("decimals", [5, 6])
@pytest.mark.parametrize("share", [0.25, 0.7, 0.9, 2])
@pytest.mark.parametrize("of", [0, 1])
def test_another_highest_rate_is_named_whichever_side_has_few_decimals(of, share, decimals):
    rates = [0.1 + SCHEDULES["cosine"](n) for n in range(17)]
    faulty = [min(rates) + share * (rate - min(rates)) for rate in rates]
    sides = [
        [round(PEAK * rate, decimals) / PEAK if at == of else rate for rate in side]
        for at, side in enumerate((rates, faulty))
    ]
    found = in_decimals([side.__getitem__ for side in sides], [decimals if at == of else None for at in (0, 1)], 17)
    assert "another-highest-lr" in found[0]


def in_decimals(sides, decimals, steps=16):
    """The names that are given where rates were logged in so many decimals, the reference's first; None: in all."""
    pair = [
        side if some is None else replace(side, precision={"lr": Precision(decimals=some)})
        for side, some in zip(traces(*sides, steps), decimals, strict=True)
    ]
    found = diagnose(*pair, compare(*pair, Tier.REASSOCIATED))
    return [{cause.name for cause in group} for group in grouped(found.causes)]


def test_no_other_warm_up_rests_below_a_rate_to_which_the_reference_rises():
    assert named(lambda n: 0.5 + 0.05 * n, lambda n: 0.6, 5) == [{"no-scheduler"}]


def of_roots(steps: int, before: int) -> Schedule:
    """A warm-up, and behind it the inverse square root of the step: at another pace it is one with another warm-up."""
    return lambda n: min((n + before) / steps, math.sqrt(steps / max(1, n + before)))


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(("steps", "other"), [(4, 7), (4, 6), (2, 9), (1, 3), (7, 30)])
@pytest.mark.parametrize("of", LENGTHS)
def test_an_inverse_square_root_at_a_slower_pace_may_have_another_warm_up(steps, other, before, of):
    found = named(of_roots(steps, before), of_roots(other, before), of)
    assert found == [{"schedule-too-long", "another-warm-up"}]


@pytest.mark.parametrize("name", ["cosine", "exponential", "polynomial"])
def test_no_other_curve_at_a_slower_pace_has_another_warm_up(name):
    """The pace of the whole is that of its warm-up, and of what comes behind it."""
    schedule = SCHEDULES[f"warm-up and {name}"]
    groups = named(schedule, lambda n: schedule(n / 2), 26)
    assert "schedule-too-long" in groups[0]
    assert "another-warm-up" not in groups[0]


@pytest.mark.parametrize("lowest", [0.1, 0.4])
def test_of_one_rate_below_the_highest_another_lowest_rate_may_have_made_another(lowest):
    found = named(lambda n: min(1.0, (n + 1) / 2), lambda n: lowest + (1 - lowest) * min(1.0, (n + 1) / 2), 17)
    assert found == [{"another-warm-up", "another-lowest-lr"}]


def test_of_two_rates_below_the_highest_another_warm_up_makes_no_other_lowest_rate():
    found = named(lambda n: min(1.0, (n + 1) / 4), lambda n: min(1.0, (n + 1) / 5), 17)
    assert "another-warm-up" in found[0]
    assert "another-lowest-lr" not in found[0]


@pytest.mark.parametrize("make", [warmed, from_one])
@pytest.mark.parametrize("name", ["linear", "cosine", "exponential", "constant", "steps"])
@pytest.mark.parametrize(("steps", "other"), [(5, 10), (5, 9), (8, 9), (2, 12)])
def test_a_warm_up_that_goes_on_beyond_the_record_is_a_longer_one_or_a_slower_schedule(make, name, steps, other):
    """The reference has passed its peak, and the candidate has not: nothing tells what it will do behind it."""
    (group,) = named(make(SHAPES[name], steps), make(SHAPES[name], other), 9)
    assert group >= {"another-warm-up", "schedule-too-long"}


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("of", [9, 12])
def test_a_slower_schedule_that_has_passed_its_peak_has_no_other_warm_up(name, of):
    """A curve or a line that goes down more slowly, too, is slower in all."""
    schedule = warmed(SHAPES[name], 3)
    (group,) = named(schedule, lambda n: schedule(n / 2), of)
    assert "schedule-too-long" in group
    assert "another-warm-up" not in group


def test_a_rise_that_is_no_line_or_goes_beyond_the_peak_is_no_longer_warm_up():
    schedule = warmed(SHAPES["cosine"], 5)
    assert not any("another-warm-up" in it for it in named(schedule, lambda n: schedule(n // 2), 9))
    assert not any("another-warm-up" in it for it in named(schedule, lambda n: 0.15 * n, 9))


@pytest.mark.parametrize("make", [warmed, from_one])
@pytest.mark.parametrize("of", [3, 9])
@pytest.mark.parametrize("resting", [1.0, 0.75])
def test_no_warm_up_gives_one_rate_where_the_reference_s_goes_on_beyond_the_record(make, of, resting):
    found = named(make(SHAPES["constant"], 15), lambda n: resting, of)
    assert found == [{"no-scheduler", "another-warm-up"}]


@pytest.mark.parametrize("schedule", [lambda n: 0.1 * math.sqrt(n + 1), SHAPES["linear"], SHAPES["cosine"]])
@pytest.mark.parametrize("resting", [1.0, 0.5])
def test_one_rate_beside_what_is_no_rising_line_is_no_warm_up(schedule, resting):
    (group,) = named(schedule, lambda n: resting, 9)
    assert "no-scheduler" in group
    assert "another-warm-up" not in group
