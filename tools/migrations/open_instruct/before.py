"""The training loop of open-instruct's grpo_fast (read in e6c3044a), in our words, over the bare engine.

    deepspeed --num_accelerators 2 tools/migrations/open_instruct/before.py --trace before.jsonl
    deepspeed --num_accelerators 2 tools/migrations/open_instruct/before.py --zero 3 --sp 2 --probe

Cited: open_instruct/grpo_fast.py:340-391 (gas 1, the schedule's steps), 601-608 (packs of a step), 718-735 (the loss,
the boundary, the step); grpo_utils.py:651-671 (tokens of a step on all ranks).
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
from tools.migrations.open_instruct.task import BATCHES, built, cuts, mean, sequence_parallel, sliced

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, sp: int, trace: Path | None = None, probe: bool = False) -> Watch:
    """Train; returns what was seen of the engine."""
    world = dist.get_world_size()
    ranks, rank = world // sp, dist.get_rank() // sp
    whole, optimizer, scheduler = built(probe)
    mpu = sequence_parallel(sp)
    config = plain_of(config) | {"gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(
        model=sliced(whole, mpu), optimizer=optimizer, lr_scheduler=scheduler, config=config, mpu=mpu
    )
    watch = Watch(engine, mean=mean if probe else None, twin=built(probe)[0], trace=trace, config=config, peers=sp)
    for cut in cuts(ranks, 1 if probe else BATCHES):
        for rows in cut.steps:
            tokens = sum(one.loss_tokens for row in rows for pack in row for one in pack)
            for row in rows:
                batch, last = collate(row[rank]), row is rows[-1]
                loss = engine(**batch.inputs)
                engine.set_gradient_accumulation_boundary(last)
                engine.backward(loss / tokens * (world // sp))
                watch.ran(batch, loss / batch.tokens)
                if last:
                    engine.step()
                    watch.stepped()
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, sp=(1, "ranks that share a sequence"))
    deepspeed.init_distributed()
    say("before", train(given.config, given.sp, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
