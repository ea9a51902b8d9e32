"""The same rollouts with ds_parity: steps of a fixed number of rollouts, and a schedule that moves by rollouts.

    deepspeed --num_accelerators 2 tools/migrations/roll/after.py --trace after.jsonl

Micro-batches are as many as their tokens need, and no count follows from them.
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
from tools.migrations.roll.task import MOST, built, generated

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, trace: Path | None = None) -> Watch:
    """Train; returns what was seen of the engine."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer, scheduler = built()
    engine, *_ = ds_parity.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    watch = Watch(engine, trace=trace, config=config)
    rollouts = [one for batch in generated() for one in batch]
    plan = ds_parity.plan(rollouts, dp_world_size=ranks, target=engine.window.target, max_tokens=MOST, layout="padded")
    for micro_batch in engine.passes(ds_parity.micro_batches(plan, rank)):
        loss = engine(**micro_batch.inputs)
        engine.backward(loss)
        watch.ran(micro_batch, loss)
        engine.step()
        watch.stepped()
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG)
    deepspeed.init_distributed()
    say("after", train(given.config, given.trace).close())


if __name__ == "__main__":
    sys.exit(launched(main))
