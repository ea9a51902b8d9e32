"""The same loop with ds_parity, over the same packs: the caller ends windows, and divides the loss.

    deepspeed --num_accelerators 2 tools/migrations/open_instruct/after.py --trace after.jsonl
    deepspeed --num_accelerators 2 tools/migrations/open_instruct/after.py --zero 3 --sp 2 --probe

With --sp ranks share a sequence, and each has the loss of its own slice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

import ds_parity
from ds_parity.collation import collate
from tools.migrations.common import Found, Watch, arguments, launched, say
from tools.migrations.open_instruct.task import BATCHES, built, cuts, mean, sequence_parallel, sliced

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, sp: int, trace: Path | None = None, probe: bool = False) -> Watch:
    """Train; returns what was seen of the engine."""
    world = dist.get_world_size()
    ranks, rank = world // sp, dist.get_rank() // sp
    whole, optimizer, scheduler = built(probe)
    mpu = sequence_parallel(sp)
    engine, *_ = ds_parity.initialize(
        model=sliced(whole, mpu), optimizer=optimizer, lr_scheduler=scheduler, config=config, mpu=mpu
    )
    watch = Watch(engine, mean=mean if probe else None, twin=built(probe)[0], trace=trace, config=config, peers=sp)
    for cut in cuts(ranks, 1 if probe else BATCHES):
        for rows in cut.steps:
            tokens = sum(one.loss_tokens for row in rows for pack in row for one in pack)
            for row in rows:
                batch, last = collate(row[rank]), row is rows[-1]
                loss = engine(**batch.inputs)
                engine.backward(loss / tokens * world, rollouts=batch.rollouts, tokens=batch.tokens)
                watch.ran(batch, loss / batch.tokens)
                if last:
                    engine.step()
                    watch.stepped()
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, sp=(1, "ranks that share a sequence"))
    deepspeed.init_distributed()
    say("after", train(given.config, given.sp, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
