"""What ranks send each other on the host: how often, and what bounds the waits for it."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_parity.engine.ranks.limits import Limit
from tests.distributed.cells import config
from tests.distributed.engines import Batch, build, exchanges_of, forward, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


def sums_of(engine):
    """How many sums and gathers on the host were no exchange of counts."""
    return engine._self_driver.over.collectives - exchanges_of(engine)


@on_two_ranks
def collectives(folder):
    """Exchanges, and other collectives on the host, of each of five windows of 4 passes a rank."""
    return {
        f"{drive}, ahead {ahead}": _windows(drive, ahead)
        for drive, ahead in (("loop", 0), ("passes", 0), ("passes", 4))
    }


@on_two_ranks
def callers_collectives(folder):
    """The same where the caller ends windows, and the step's metrics."""
    engine = build(config(1, boundary="caller"))
    seen, rewards, before = [], [], (exchanges_of(engine), sums_of(engine))
    for number in range(5):
        for _ in range(4):
            loss = engine.backward(forward(engine, 1), rollouts=1, tokens=3)
            engine.record("kl" if number == 2 and dist.get_rank() else "reward", float(number), weight=1)
        if number == 3:
            for one in range(70):  # too many for one message
                engine.record(f"metric {one}", loss)
        engine.step()
        now = exchanges_of(engine), sums_of(engine)
        seen.append([now[0] - before[0], now[1] - before[1]])
        before = now
        rewards.append(engine.last_step.metrics["reward"])
    return {"collectives": seen, "rewards": rewards}


def test_a_step_of_the_caller_costs_one_sum_for_counts_loss_and_metrics(two_ranks):
    seen = two_ranks.of(callers_collectives)
    # The first window's total is exchanged in its first backward, and a new name costs a gather and its own sum.
    assert seen["collectives"] == [[2, 2], [1, 0], [1, 2], [1, 2], [1, 1]]
    assert seen["rewards"] == [0.0, 1.0, 2.0, 3.0, 4.0]


@on_two_ranks
def steps_without_backward(folder):
    """What a window holds of metrics that were recorded before a step() that was refused."""
    engine = build(config(1, boundary="caller"))
    engine.record("reward", 1.0, weight=1)
    said = refusal(engine.step)
    engine.record("reward", 3.0, weight=1)
    engine.backward(forward(engine, 1), rollouts=1, tokens=3)
    engine.step()
    refused = {"said": said, "metrics": engine.last_step.metrics}
    steps = []
    for promises in (False, True):
        engine = build(config(1, boundary="caller"))
        for window in range(2):
            if promises and window == 0:
                engine.expect(rollouts=2)
            for number in (1, 2):
                engine.record("number", float(number + 10 * window), weight=1)
                engine.backward(forward(engine, number), rollouts=1, tokens=3)
                if promises and number == 1 and window == 0:
                    refused["broken"] = refusal(engine.step)
            engine.step()
            steps.append((engine.last_step.loss, engine.last_step.metrics))
    return {**refused, "without": steps[:2], "mended": steps[2:]}


def test_what_was_recorded_before_a_refused_step_stays_in_its_window(two_ranks):
    seen = two_ranks.of(steps_without_backward)
    assert "without a backward() before it on any rank" in str(seen["said"])
    assert seen["metrics"] == {"reward": 2.0}
    assert seen["broken"].startswith("WindowError")
    assert seen["mended"] == seen["without"]
    assert [metrics for _, metrics in seen["mended"]] == [{"number": 1.5}, {"number": 11.5}]


def _windows(drive, ahead):
    engine = build(config(1, passes=8, lookahead=ahead))
    passes = engine.passes((Batch() for _ in range(20)), finish=False) if drive == "passes" else range(20)
    counts = {} if drive == "passes" else {"rollouts": 1, "tokens": 3}
    seen, before = [], (exchanges_of(engine), sums_of(engine))
    for number, _ in enumerate(passes):
        loss = engine.backward(forward(engine, 1), **counts)
        # Another name in the third window, on one rank alone.
        engine.record("kl" if number // 4 == 2 and dist.get_rank() else "reward", loss)
        engine.step()
        if engine.window.passes == 0:
            now = exchanges_of(engine), sums_of(engine)
            seen.append([now[0] - before[0], now[1] - before[1]])
            before = now
    return seen


@pytest.mark.parametrize(("case", "exchanges"), [("loop, ahead 0", 4), ("passes, ahead 0", 4), ("passes, ahead 4", 1)])
def test_a_window_costs_its_exchanges_and_one_sum_and_two_more_where_a_name_is_new(two_ranks, case, exchanges):
    windows = two_ranks.of(collectives)[case]
    assert [exchanged for exchanged, _ in windows] == [exchanges] * 5
    assert [others for _, others in windows] == [3, 1, 3, 1, 1]


@on_two_ranks
def limits(folder):
    """The limits of DeepSpeed's groups inside and outside of a call, and how long a rank that is late is waited for."""
    engine = build(config(3, passes=8, exchange_timeout=77.0))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=500))
    held, before = engine._self_driver._limit._backends, _limits(engine)
    with engine._self_driver.waiting("a test"):
        inside = _limits(engine)
    one_pass(engine, 1, rollouts=1, tokens=3)
    after = _limits(engine)
    begun = time.perf_counter()
    late = "nobody came" if dist.get_rank() else refusal(lambda: _late(engine, group))
    seconds = time.perf_counter() - begun
    dist.barrier()
    return {
        "inside": inside,
        "before": before,
        "after": after,
        "late": late,
        "seconds": seconds,
        "n": len(held),
    }


def _late(engine, group):
    driver = engine._self_driver
    driver._limit = Limit([group], 1.5)
    with driver.waiting("a test"):
        dist.all_reduce(torch.ones(1), group=group)


def _limits(engine):
    return [backend.options._timeout.total_seconds() for backend in engine._self_driver._limit._backends]


def test_inside_a_pass_deepspeeds_groups_wait_as_long_as_the_exchange_and_as_before_outside(two_ranks):
    result = two_ranks.of(limits)
    assert result["n"] >= 2, "that of all ranks, and DeepSpeed's copy of it"
    assert set(result["inside"]) == {77.0}
    assert result["after"] == result["before"]
    assert 77.0 not in result["before"]


def test_a_collective_that_a_rank_does_not_come_to_ends_when_the_time_is_up(two_ranks):
    result = two_ranks.of(limits)
    assert result["late"].startswith("RankDesyncError: rank 0 waited for another rank in a test, up to 77 s")
    assert 1.4 < result["seconds"] < 10
