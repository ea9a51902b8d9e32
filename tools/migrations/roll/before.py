"""ROLL's training steps with dynamic batching (read in 8eb27cc2), in our words, over the bare DeepSpeed engine.

    deepspeed --num_accelerators 2 tools/migrations/roll/before.py --trace before.jsonl

Cited: roll/pipeline/base_worker.py:87-105, roll/distributed/strategy/megatron_strategy.py:1271-1322 (a step of the
scheduler behind each step of the optimizer), roll/configs/base_config.py:748-765 (what the scheduler counts on). ROLL
itself trains with Megatron there; its own DeepSpeed strategy was removed in June 2026.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from ds_parity.collation import collate
from tools.migrations.common import Found, Watch, arguments, launched, plain_of, say
from tools.migrations.roll.batches import steps
from tools.migrations.roll.task import GAS, MOST, built, generated

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, trace: Path | None = None) -> Watch:
    """Train; returns what was seen of the engine."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer, scheduler = built()
    config = plain_of(config) | {"gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    watch = Watch(engine, trace=trace, config=config)
    for batch in generated():
        for rows in steps(batch, ranks, MOST, GAS):
            tokens = sum(one.loss_tokens for row in rows for share in row for one in share)
            for row in rows:
                micro_batch, last = collate(row[rank]), row is rows[-1]
                loss = engine(**micro_batch.inputs)
                engine.set_gradient_accumulation_boundary(last)
                engine.backward(loss * micro_batch.tokens / tokens * ranks)
                watch.ran(micro_batch, loss)
                engine.step()
                watch.stepped()
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG)
    deepspeed.init_distributed()
    say("before", train(given.config, given.trace).close())


if __name__ == "__main__":
    sys.exit(launched(main))
