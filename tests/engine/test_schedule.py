"""A schedule that counts rollouts: it stands where as many plain steps as targets were consumed would put it."""

import random

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

from ds_parity.engine.internals.schedule import RolloutSchedule
from ds_parity.errors import ConfigError
from ds_parity.window import Progress

# Only schedules are stepped here, and torch misses the optimizer's steps between them.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

TARGET = 8
WARMUP = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4}

DEEPSPEED = {
    "WarmupLR": lambda o: lr_schedules.WarmupLR(o, **WARMUP),
    "WarmupLR-linear": lambda o: lr_schedules.WarmupLR(o, **WARMUP, warmup_type="linear"),
    "WarmupDecayLR": lambda o: lr_schedules.WarmupDecayLR(o, total_num_steps=12, **WARMUP),
    "WarmupCosineLR": lambda o: lr_schedules.WarmupCosineLR(o, total_num_steps=12, warmup_num_steps=4),
    "OneCycle": lambda o: lr_schedules.OneCycle(
        o, cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=5, decay_step_size=2, decay_lr_rate=0.5
    ),
    "LRRangeTest": lambda o: lr_schedules.LRRangeTest(o, lr_range_test_min_lr=0.01, lr_range_test_step_size=3),
}
FRACTIONAL = {**DEEPSPEED, "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda at: 1 / (1 + at))}
WHOLE = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=12),
}
EVERY = {**FRACTIONAL, **WHOLE}


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def built(name):
    """A scheduler, and a function that reads its optimizer's LR."""
    sgd = optimizer()
    return EVERY[name](sgd), lambda: sgd.param_groups[0]["lr"]


def plain(name, steps):
    """The LRs before and after each of some plain steps."""
    scheduler, lr = built(name)
    rates = [lr()]
    for _ in range(steps):
        scheduler.step()
        rates.append(lr())
    return rates


def stepped(schedule, progress):
    schedule.advance_to(progress)
    schedule.step()


def uneven(count, units, seed=0):
    """`count` numbers of at least 1 that sum to `units`, drawn at random."""
    cuts = sorted(random.Random(seed).sample(range(1, units), count - 1))
    return [after - before for before, after in zip([0, *cuts], [*cuts, units], strict=True)]


@pytest.mark.parametrize("name", EVERY)
def test_at_progress_1_2_3_the_rates_are_those_of_plain_steps_to_the_last_bit(name):
    scheduler, lr = built(name)
    schedule, progress = RolloutSchedule(scheduler), Progress(TARGET)
    rates = [lr()]
    for _ in range(15):
        progress = progress.advanced(TARGET)
        stepped(schedule, progress)
        rates.append(lr())
    assert rates == plain(name, 15)
    assert len(set(rates)) > 3


@pytest.mark.parametrize("name", DEEPSPEED)
@pytest.mark.parametrize("units", [10, 12, 20, 30, 43, 60, 90, 101])
def test_deepspeeds_schedulers_stand_at_the_fraction_itself(name, units):
    (scheduler, lr), (formula, expected) = built(name), built(name)
    stepped(RolloutSchedule(scheduler), Progress(TARGET, units))
    formula.step(units / TARGET - 1)
    assert scheduler.last_batch_iteration == units / TARGET - 1
    assert lr() == expected()


@pytest.mark.parametrize("name", ["WarmupLR-linear", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"])
def test_half_way_between_two_steps_the_rate_lies_between_theirs(name):
    at_2, at_3 = plain(name, 3)[2:]
    scheduler, lr = built(name)
    stepped(RolloutSchedule(scheduler), Progress(TARGET, 20))
    assert min(at_2, at_3) < lr() < max(at_2, at_3)


WARMUPS = {
    f"{name}-{kind}-{steps}": (
        lambda o, name=name, **params: getattr(lr_schedules, name)(o, **params),
        kind,
        steps,
        extra,
    )
    for name, extra in {
        "WarmupLR": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1},
        "WarmupDecayLR": {"warmup_max_lr": 0.1, "total_num_steps": 12},
        "WarmupCosineLR": {"total_num_steps": 12},
    }.items()
    for kind in ("log", "linear")
    for steps in (1, 2, 3, 4, 10)
}
CYCLES = {
    f"{first}-{second}-{stairs}-{decay}": {
        "cycle_first_step_size": first,
        "cycle_second_step_size": second,
        "cycle_first_stair_count": stairs,
        "decay_step_size": decay,
        "decay_lr_rate": 0.5,
    }
    for first, second in ((5, None), (1, 1), (2, 7), (2.5, 3.5))
    for stairs in (0, 2)
    for decay in (0, 2)
}


def warming_up(name):
    build, kind, steps, extra = WARMUPS[name]
    return lambda o: build(o, warmup_type=kind, warmup_num_steps=steps, **extra)


BETWEEN = {
    **{name: warming_up(name) for name in WARMUPS},
    **{
        f"OneCycle-{name}": lambda o, p=p: lr_schedules.OneCycle(o, cycle_min_lr=0.01, cycle_max_lr=0.1, **p)
        for name, p in CYCLES.items()
    },
    **{
        f"LRRangeTest-{stairs}": lambda o, stairs=stairs: lr_schedules.LRRangeTest(
            o, lr_range_test_min_lr=0.01, lr_range_test_step_size=3, lr_range_test_staircase=stairs
        )
        for stairs in (False, True)
    },
}


def rates(build, units, target):
    """The LRs of a schedule that was put at each of some positions."""
    sgd = optimizer()
    schedule, seen = RolloutSchedule(build(sgd)), []
    for at in units:
        stepped(schedule, Progress(target, at))
        seen.append(sgd.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize("name", BETWEEN)
def test_between_two_steps_the_rate_lies_between_theirs(name):
    """DeepSpeed's warm-up by the logarithm reaches its maximum a step early, and at a fraction would go on above it."""
    whole = rates(BETWEEN[name], range(16), 1)
    fractional = rates(BETWEEN[name], range(15 * 32), 32)
    for at, rate in enumerate(fractional):
        assert min(whole[at // 32 :][:2]) <= rate <= max(whole[at // 32 :][:2]), at / 32
    assert fractional[::32] == whole[:15]


@pytest.mark.parametrize("name", WARMUPS)
def test_a_warm_up_never_falls_and_never_goes_above_its_maximum(name):
    steps = max(2, WARMUPS[name][2])
    # One step after the last of the warm-up (WarmupCosineLR: at it) the rate may fall already.
    warming = rates(BETWEEN[name], range(steps * 32 + 1), 32)
    assert warming == sorted(warming)
    assert max(rates(BETWEEN[name], range(15 * 32), 32)) <= 0.1


@pytest.mark.parametrize("units", [1, 4, 10, 20, 43, 101])
def test_lambdalr_is_asked_at_the_fraction(units):
    """Within one rounding: torch's step() adds the 1 that was taken off."""
    scheduler, lr = built("LambdaLR")
    stepped(RolloutSchedule(scheduler), Progress(TARGET, units))
    assert lr() == pytest.approx(0.1 / (1 + units / TARGET), rel=1e-14)


@pytest.mark.parametrize("name", WHOLE)
def test_other_schedulers_take_floor_of_progress_plain_steps_and_carry_the_remainder(name):
    scheduler, lr = built(name)
    schedule, progress, rates = RolloutSchedule(scheduler), Progress(TARGET), plain(name, 12)
    for units in (3, 3, 3, 8, 20, 1, 1, 1, 24, 7):
        progress = progress.advanced(units)
        stepped(schedule, progress)
        assert lr() == rates[progress.units // TARGET]
    assert progress.whole == 8
    assert scheduler.last_epoch == 8


def test_a_scheduler_that_moves_by_a_metric_is_refused():
    with pytest.raises(ConfigError, match=r"lr_progress is 'rollout' but the scheduler is ReduceLROnPlateau"):
        RolloutSchedule(lr_scheduler.ReduceLROnPlateau(optimizer()))


@pytest.mark.parametrize("name", EVERY)
def test_what_deepspeed_passes_to_step_does_not_move_it(name):
    schedule, rates = RolloutSchedule(built(name)[0]), []
    for kwargs in ({}, {"last_batch_iteration": 99}):
        schedule.advance_to(Progress(TARGET, 3 * TARGET))
        schedule.step(**kwargs)
        rates.append(schedule.get_last_lr())
    assert rates[0] == rates[1] == [plain(name, 3)[3]]


def test_it_is_the_scheduler_in_everything_else():
    scheduler, _ = built("WarmupDecayLR")
    schedule = RolloutSchedule(scheduler)
    assert isinstance(schedule, lr_schedules.WarmupDecayLR)
    assert schedule.total_num_steps == 12
    before = scheduler.last_batch_iteration
    schedule.step()
    assert scheduler.last_batch_iteration == before


# The run of 2,400 optimizer steps that took 8,429 updates.


def decaying():
    sgd = optimizer()
    scheduler = lr_schedules.WarmupDecayLR(sgd, total_num_steps=2400, warmup_max_lr=0.1, warmup_num_steps=100)
    return scheduler, lambda: sgd.param_groups[0]["lr"]


def test_8429_uneven_updates_over_the_data_of_2400_end_where_2400_plain_steps_end():
    (scheduler, lr), (reference, end) = decaying(), decaying()
    schedule, progress = RolloutSchedule(scheduler), Progress(target=64)
    updates = uneven(8_429, 2_400 * 64)
    assert len(set(updates)) > 20
    for units in updates:
        progress = progress.advanced(units)
        stepped(schedule, progress)
        assert scheduler.last_batch_iteration <= 2_399
        assert lr() > 0 or progress.nominal <= 1
    for _ in range(2_400):
        reference.step()
    assert scheduler.last_batch_iteration == reference.last_batch_iteration == 2_399
    assert lr() == end() > 0


def test_one_step_an_update_runs_out_of_budget_after_2401_of_8429_updates():
    scheduler, lr = decaying()
    rates = []
    for _ in range(8_429):
        scheduler.step()
        rates.append(lr())
    assert rates.index(0.0, 1) == 2_400
    assert set(rates[2_400:]) == {0.0}


# Checkpoints.


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("saved_after", [1, 3, 6])
def test_a_schedule_restored_from_a_checkpoint_goes_on_like_the_one_that_was_saved(name, saved_after):
    windows = [3, 7, 9, 8, 13, 20, 5, 11]
    sgd = optimizer()
    original, progress = RolloutSchedule(EVERY[name](sgd)), Progress(TARGET)
    for units in windows[:saved_after]:
        progress = progress.advanced(units)
        stepped(original, progress)
    state, weights = original.state_dict(), sgd.state_dict()
    other = optimizer()
    restored = RolloutSchedule(EVERY[name](other))
    other.load_state_dict(weights)
    restored.load_state_dict(state)
    restored.resume_at(progress)
    for units in windows[saved_after:]:
        progress = progress.advanced(units)
        stepped(original, progress)
        stepped(restored, progress)
        assert other.param_groups[0]["lr"] == sgd.param_groups[0]["lr"]
