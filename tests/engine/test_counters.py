"""DeepSpeed's counters under DeepSpeed's own timer, with seconds that a test can choose."""

import math
from types import SimpleNamespace

import pytest
from deepspeed.utils import timer as timers
from deepspeed.utils.timer import ThroughputTimer

from ds_parity.engine.internals.counters import Counters


@pytest.fixture
def engine(monkeypatch):
    """An engine with the real throughput timer; its clock moves by hand."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(timers.time, "time", lambda: clock.now)
    config = SimpleNamespace(enabled=True, synchronized=False)
    lines = []
    timer = ThroughputTimer(config, batch_size=7, steps_per_output=1, logging_fn=lines.append)
    return SimpleNamespace(
        tput_timer=timer, clock=clock, lines=lines, train_batch_size=lambda: 7, global_samples=0, micro_steps=0
    )


def a_window(engine, counters, rollouts, seconds, step=True):
    ledger = SimpleNamespace(rollouts=engine.global_samples + rollouts, passes=engine.micro_steps + 1)
    engine.tput_timer.start()
    engine.clock.now += seconds
    if step:
        counters.before_step(engine.global_samples, rollouts)
        engine.global_samples += engine.train_batch_size()
        engine.tput_timer.stop(global_step=True)
    else:
        engine.tput_timer.stop(global_step=False)
        counters.consumed(rollouts)
    counters.settle(ledger)


def test_the_average_is_rollouts_over_seconds_from_the_third_step_on(engine):
    counters = Counters(engine)
    for rollouts, seconds in ((100, 1), (100, 1), (6, 2), (10, 2)):
        a_window(engine, counters, rollouts, seconds)
    assert engine.tput_timer.avg_samples_per_sec() == 16 / 4


def test_deepspeeds_own_average_is_its_fixed_batch_size_a_step(engine):
    """The control: what the same windows show without the correction."""
    timer = engine.tput_timer
    for seconds in (1, 1, 2, 2):
        timer.start()
        engine.clock.now += seconds
        timer.stop(global_step=True)
    assert timer.avg_samples_per_sec() == 2 * 7 / 4


def test_the_line_of_a_step_shows_its_own_rollouts_and_those_of_a_window_without_a_step_before_it(engine):
    counters = Counters(engine)
    for rollouts, step in ((1, True), (1, True), (6, True), (4, False), (10, True), (8, True)):
        a_window(engine, counters, rollouts, 2, step)
    told = [line.split("CurrSamplesPerSec=")[1].split(",")[0] for line in engine.lines]
    assert [float(one) for one in told] == pytest.approx([6 / 2, 14 / 4, 8 / 2], rel=1e-5)


def test_it_is_unknown_before_the_first_timed_window(engine):
    counters = Counters(engine)
    a_window(engine, counters, 6, 1)
    assert engine.tput_timer.avg_samples_per_sec() == -math.inf


def test_samples_and_passes_are_the_ledgers(engine):
    counters = Counters(engine)
    a_window(engine, counters, 6, 1)
    assert (engine.global_samples, engine.micro_steps) == (6, 1)
