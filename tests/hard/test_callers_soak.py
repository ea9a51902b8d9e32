"""3,000 windows that the caller ends, in every way: memory, handles and threads are flat, and every count is right."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.cells import config
from tests.distributed.engines import Batch, build, forward
from tests.hard.test_soak import _look

WINDOWS, EARLY = 3000, 300
WAYS = ("plain", "announced", "block", "expected", "empty", "uneven", "passes")


def soak_of_the_caller(rank, stage, windows, early):
    """Train; return what there is after `early` windows and at the end, and what the engine has counted.

    Args:
        rank: of this process.
        stage: ZeRO stage.
        windows: of 0 to 3 passes a rank, in each of WAYS in turn.
        early: when to look first.
    """
    section = {"boundary": "caller", "loss_weight": "token", "exchange_timeout": 60.0}
    engine = build({**config(stage, optimizer="AdamW", **section), "gradient_accumulation_passes": 4})
    right, looks, wrong = {"rollouts": 0, "steps": 0}, [], []
    for window in range(windows):
        way = WAYS[window % len(WAYS)]
        rollouts, tokens = _window(engine, way, window, rank, stage)
        right["rollouts"] += rollouts
        right["steps"] += bool(tokens)
        if window % 50 == window // 50 % len(WAYS):  # in another way each time
            last = engine.last_step
            if (last.step, last.rollouts, last.tokens, last.skipped) != (window + 1, rollouts, tokens, not tokens):
                wrong.append(f"window {window}, {way}: {last}")
        if window + 1 in (early, windows):
            handles = len(list(Path("/proc/self/fd").iterdir()))
            looks.append({**_look(), "handles": handles, "threads": threading.active_count()})
    first, last = looks
    grown = (last.pop("types") - first.pop("types")).most_common(5)
    got = {"rollouts": engine.global_samples, "steps": engine.global_steps}
    return {"first": first, "last": last, "grown": grown, "got": got, "right": right, "wrong": wrong}


def _window(engine, way, window, rank, stage):
    """Run one window; return its rollouts and tokens over all ranks."""
    ranks, passes = dist.get_world_size(), 1 + window % 3
    by_rank = [passes] * ranks
    if way == "uneven" and stage < 2:
        by_rank = [(window + one) % 3 for one in range(ranks)]
    tokens = 0 if way == "empty" else 2 + window % 4
    # A name that changes with every window must not be kept for good.
    engine.record("reward" if window % 5 else f"reward {window}", float(window))
    if way == "expected":
        engine.expect(rollouts=by_rank[rank], tokens=by_rank[rank] * tokens, passes=by_rank[rank])
    if way == "passes":
        for index, _ in enumerate(engine.passes([Batch(tokens=tokens) for _ in range(passes)], finish=False)):
            engine.backward(forward(engine, 1000 * rank + window + index))
        engine.step()
        return sum(by_rank), sum(by_rank) * tokens
    block = engine.coalesce_grad_reduction() if way == "block" and stage else contextlib.nullcontext()
    with block:
        for index in range(by_rank[rank]):
            if way == "announced" and index + 1 == by_rank[rank]:
                engine.set_gradient_accumulation_boundary(True)
            loss = forward(engine, 1000 * rank + window + index)
            engine.backward(loss, rollouts=1, tokens=tokens)
    engine.step()
    return sum(by_rank), sum(by_rank) * tokens


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_grows_in_windows_of_the_caller(forks, stage):
    outcomes = forks.run(soak_of_the_caller, 2, 400, stage=stage, windows=WINDOWS, early=EARLY)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    for one in outcomes:
        first, last = one.value["first"], one.value["last"]
        grown = {name: last[name] - first[name] for name in first}
        print(f"\nZeRO {stage}: {grown}, by type {one.value['grown']}")
        assert one.value["wrong"] == []
        assert one.value["got"] == one.value["right"]
        assert grown["objects"] < (WINDOWS - EARLY) // 10, one.value["grown"]
        assert grown["blocks"] < WINDOWS - EARLY
        assert grown["resident"] < 16 * 2**20
        assert grown["handles"] == 0
        assert grown["threads"] == 0
