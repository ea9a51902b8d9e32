"""The same sequences with ds_parity: windows of whole prompts, however many turns they have.

    deepspeed --num_accelerators 2 tools/migrations/skyrl/after.py --batches 3 --trace after.jsonl
    deepspeed --num_accelerators 2 tools/migrations/skyrl/after.py --batches 0

With --batches 0 a window has fewer sequences than there are ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

import ds_parity
from tools.migrations.common import Found, Watch, arguments, launched, say
from tools.migrations.skyrl.task import TURNS, built, few, mean, sequences, twin

CONFIG = Path(__file__).with_name("ds_config.json")
MOST = 1024
"""Tokens of a micro-batch, its rows padded to the longest."""


def train(config: Found, batches: int, trace: Path | None = None, probe: bool = False) -> Watch:
    """Train on so many batches, 0: on one of few sequences; returns what was seen of the engine."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer, scheduler = built(max(batches, 1), probe)
    config = config if batches else config | {"gradient_accumulation_passes": 1}
    engine, *_ = ds_parity.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    watch = Watch(engine, mean=mean if probe else None, twin=twin(), trace=trace, config=config)
    for data in [sequences(*one) for one in enumerate(TURNS[:batches])] or [few()]:
        plan = ds_parity.plan(
            data, dp_world_size=ranks, target=engine.window.target, max_tokens=MOST, count="prompt", layout="padded"
        )
        for batch in engine.passes(ds_parity.micro_batches(plan, rank)):
            summed = engine(**batch.inputs)
            engine.backward(summed)
            watch.ran(batch, summed / max(batch.tokens, 1))
            engine.step()
            watch.stepped()
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, batches=(3, "1 to 3, 0: few sequences"))
    deepspeed.init_distributed()
    say("after", train(given.config, given.batches, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
