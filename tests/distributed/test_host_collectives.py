"""What ranks send each other on the host: how often, and what bounds the waits for it."""

import random
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_parity.engine.ranks.limits import Limit
from ds_parity.errors import RankDesyncError
from ds_parity.parity.running import weights
from tests.distributed.cells import config
from tests.distributed.engines import (
    Batch,
    build,
    exchanges_of,
    forward,
    from_all,
    one_pass,
    refusal,
    sums_of,
    until_made,
)
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

EARLY = {
    "ZeRO 0": (0, 4, False),
    "ZeRO 1": (1, 3, False),
    "ZeRO 2": (2, 4, False),
    "ZeRO 3": (3, 4, False),
    "whole windows": (1, "window", False),
    "weights": (1, 4, True),
}
"""Cases to stage, look-ahead, and whether micro-batches bring weights."""


@dataclass
class Weighed(Batch):
    """A micro-batch that may bring its weight."""

    weight: float | None = None


@on_two_ranks
def collectives(folder):
    """Exchanges, and other collectives on the host, of each of five windows of 4 passes a rank."""
    return {
        **{
            f"{drive}, ahead {ahead}": _windows(drive, ahead)
            for drive, ahead in (("loop", 0), ("passes", 0), ("passes", 4))
        },
        "made in a thread": _windows("passes", 4, prefetch=4),
        "by whole windows": _windows("passes", "window", prefetch=4),
        "on one rank alone": _windows("passes", 4, prefetch=4 * dist.get_rank()),
        "on one rank not in time": _windows("passes", 4, prefetch=4, late=dist.get_rank() == 1),
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


class _Slow:
    """Makes the micro-batches of a window only when they are asked for."""

    def __init__(self, late):
        self.allowed, self._late = threading.Semaphore(0), late

    def __iter__(self):
        for number in range(20):
            if self._late and number and number % 4 == 0:
                self.allowed.acquire()
            yield Batch()


def _windows(drive, ahead, prefetch=0, *, late=False):
    engine = build(config(1, passes=8, lookahead=ahead))
    stream = _Slow(late)
    options = {"finish": False, "prefetch": prefetch}
    passes = engine.passes(iter(stream), **options) if drive == "passes" else range(20)
    counts = {} if drive == "passes" else {"rollouts": 1, "tokens": 3}
    seen, before = [], (exchanges_of(engine), sums_of(engine))
    for number, _ in enumerate(passes):
        loss = engine.backward(forward(engine, 1), **counts)
        if prefetch and not late and number % 4 == 3:
            until_made(engine)
        # Another name in the third window, on one rank alone.
        engine.record("kl" if number // 4 == 2 and dist.get_rank() else "reward", loss)
        engine.step()
        if engine.window.passes == 0:
            now = exchanges_of(engine), sums_of(engine)
            seen.append([now[0] - before[0], now[1] - before[1]])
            before = now
            stream.allowed.release()
    return seen


@pytest.mark.parametrize(("case", "exchanges"), [("loop, ahead 0", 4), ("passes, ahead 0", 4), ("passes, ahead 4", 1)])
def test_a_window_costs_its_exchanges_and_one_sum_and_two_more_where_a_name_is_new(two_ranks, case, exchanges):
    windows = two_ranks.of(collectives)[case]
    assert [exchanged for exchanged, _ in windows] == [exchanges] * 5
    assert [others for _, others in windows] == [3, 1, 3, 1, 1]


@pytest.mark.parametrize("case", ["made in a thread", "by whole windows"])
def test_a_window_costs_one_collective_where_a_thread_has_made_its_micro_batches(two_ranks, case):
    """The counts of its passes travel with the loss and the metrics of the step before."""
    windows = two_ranks.of(collectives)[case]
    assert [exchanged for exchanged, _ in windows] == [1, 0, 0, 0, 0]
    # In front of the first window ranks agree on how far they look ahead, where that follows from the window.
    assert [others for _, others in windows][1:] == [1, 3, 1, 1]


@pytest.mark.parametrize("case", ["on one rank alone", "on one rank not in time"])
def test_a_window_costs_two_where_a_rank_does_not_know_its_micro_batches_in_time(two_ranks, case):
    windows = two_ranks.of(collectives)[case]
    assert [exchanged for exchanged, _ in windows] == [1] * 5
    assert [others for _, others in windows] == [3, 1, 3, 1, 1]


@on_two_ranks
def early_or_not(folder):
    """Uneven streams, whose counts travel with the steps or not: what is handed out, steps and weights."""
    results = {}
    for case, (stage, ahead, weighed) in EARLY.items():
        section = {"loss_weight": "weight"} if weighed else {"loss_weight": "token"}
        for prefetch in (0, 16):
            engine = build(config(stage, passes=8, lookahead=ahead, **section))
            generator = random.Random(dist.get_rank())
            numbers = [generator.randrange(1, 4) for _ in range(37 - 9 * dist.get_rank())]
            stream = [Weighed(number, number, 0, 2 * number, number / 3 if weighed else None) for number in numbers]
            steps, ran = [], []
            for batch in engine.passes(stream, prefetch=prefetch):
                engine.backward(forward(engine, batch.seed))
                engine.record("seed", float(batch.seed), weight=2)
                if prefetch and engine.window.closed:
                    until_made(engine)
                engine.step()
                ran.append(batch.rollouts)
                steps.append(engine.last_step and engine.last_step.model_dump())
            last = engine.last_step.model_dump()
            found = {
                "ran": from_all(ran),
                "steps": steps,
                "last": last,
                "weights": weights.vector(engine.module).tolist(),
            }
            results[f"{case}, {prefetch}"] = {"found": found, "exchanges": exchanges_of(engine)}
    return results


@pytest.mark.parametrize("case", EARLY)
def test_what_is_known_early_changes_nothing_but_the_exchanges(two_ranks, case):
    found = two_ranks.of(early_or_not)
    late, early = found[f"{case}, 0"], found[f"{case}, 16"]
    assert early["found"] == late["found"]
    assert early["exchanges"] <= late["exchanges"] / 2


@on_two_ranks
def early_ends(folder):
    """A stream that raises on one rank, and a rank that asks to stop, while counts travel with the steps."""
    engine = build(config(1, passes=8, lookahead=4))

    def breaks():
        yield from [Batch()] * 8
        if dist.get_rank():
            raise ValueError("no more of them")
        yield from [Batch()] * 8

    handed = []

    def drive(stream, stop_at=None, stop_behind=None):
        for number, _ in enumerate(engine.passes(stream, prefetch=4)):
            handed.append(number)
            if number == stop_at and dist.get_rank():
                engine.stop()
            engine.backward(forward(engine, 1))
            if number % 4 == 3 and not (number > 4 and stop_at is None and stop_behind is None):
                until_made(engine)
            engine.step()
            if number == stop_behind and dist.get_rank():
                engine.stop()

    try:
        drive(breaks())
    except (ValueError, RankDesyncError) as error:
        said = f"{type(error).__name__}: {error}"
    engine = build(config(1, passes=8, lookahead=4))
    ran, handed = handed, []
    drive((Batch() for _ in range(40)), stop_at=5)
    inside, handed = handed, []
    engine = build(config(1, passes=8, lookahead=4))
    drive((Batch() for _ in range(40)), stop_behind=7)
    return {"said": from_all(said), "ran": from_all(ran), "inside": from_all(inside), "behind": from_all(handed)}


def test_a_stream_that_raises_is_heard_of_between_windows_also_where_counts_travel_early(two_ranks):
    ended = two_ranks.of(early_ends)
    assert ended["ran"] == [[*range(8)]] * 2
    assert "no more of them" in ended["said"][0]
    assert ended["said"][1] == "ValueError: no more of them"


def test_a_rank_that_asks_to_stop_stops_all_at_the_next_boundary_that_hears_of_it(two_ranks):
    """Inside the second window, its step brings the counts that say so; behind it, the step of the third."""
    ended = two_ranks.of(early_ends)
    assert ended["inside"] == [[*range(8)]] * 2
    assert ended["behind"] == [[*range(12)]] * 2


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
