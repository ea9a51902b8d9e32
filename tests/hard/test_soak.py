"""2,000 windows: memory is flat, and nothing is kept of what is over."""

import gc
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch

from ds_parity.config import rewrite
from tests.distributed.cells import config
from tests.distributed.engines import Batch, build, forward, perceptron


def soak(rank, stage, drive, windows, early):
    """Train; return what is in memory after `early` windows and at the end.

    Args:
        rank: of this process.
        stage: ZeRO stage.
        drive: `loop`, `passes`, `ahead`, or `bare` for DeepSpeed alone.
        windows: of 1 to 2 passes.
        early: when to look first.

    Returns:
        For both moments: resident memory in bytes, Python's memory blocks and objects; and what grew most.
    """
    looks = []

    def look(window):
        if window in (early, windows):
            looks.append(_look())

    {"loop": _loop, "passes": _passes, "ahead": _passes, "bare": _bare}[drive](stage, drive, windows, look)
    first, last = looks
    grown = (last.pop("types") - first.pop("types")).most_common(5)
    return {"first": first, "last": last, "grown": grown}


def _look():
    gc.collect()
    objects = gc.get_objects()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    types = Counter(type(one).__name__ for one in objects)
    return {"resident": resident, "blocks": sys.getallocatedblocks(), "objects": len(objects), "types": types}


def _extended(stage, drive):
    section = {"loss_weight": "token", "lookahead": 3 if drive == "ahead" else 0}
    return config(stage, passes=4, optimizer="AdamW", **section)


def _loop(stage, drive, windows, look):
    engine, number = build(_extended(stage, drive)), 0
    while engine.window.index < windows:
        engine.record("reward", float(number))
        engine.backward(forward(engine, number), rollouts=1 + number % 2, tokens=3 + number % 5)
        engine.step()
        number += 1
        if number % 100 == 0:
            engine.last_step  # noqa: B018  # reading it caches a record
        if engine.window.passes == 0:
            look(engine.window.index)


def _passes(stage, drive, windows, look):
    engine = build(_extended(stage, drive))
    for number, _ in enumerate(engine.passes((Batch(tokens=3 + n % 5) for n in range(2 * windows)), finish=False)):
        engine.record("reward", torch.tensor([1.0, 2.0]))
        engine.backward(forward(engine, number))
        engine.step()
        if engine.window.passes == 0:
            look(engine.window.index)


def _bare(stage, drive, windows, look):
    model = perceptron()
    plain = rewrite(_extended(stage, drive), 2).config
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)
    for number in range(2 * windows):
        engine.set_gradient_accumulation_boundary(number % 2 == 1)
        engine.backward(forward(engine, number) / 2, scale_wrt_gas=False)
        engine.step()
        if number % 2:
            look(number // 2 + 1)


WINDOWS, EARLY = 2000, 200


@pytest.mark.parametrize(
    ("stage", "drive"), [*product((0, 1, 2, 3), ("loop",)), *product((1, 3), ("passes", "ahead", "bare"))]
)
def test_memory_after_2000_windows_is_what_it_was_after_200(forks, stage, drive):
    """The bare engine beside ds_parity: what grows there is DeepSpeed's."""
    outcomes = forks.run(soak, 2, 400, stage=stage, drive=drive, windows=WINDOWS, early=EARLY)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    for one in outcomes:
        first, last = one.value["first"], one.value["last"]
        grown = {name: last[name] - first[name] for name in first}
        print(f"\nZeRO {stage}, {drive}: {grown}, by type {one.value['grown']}")
        assert grown["objects"] < (WINDOWS - EARLY) // 10, one.value["grown"]
        assert grown["blocks"] < WINDOWS - EARLY
        assert grown["resident"] < 16 * 2**20
