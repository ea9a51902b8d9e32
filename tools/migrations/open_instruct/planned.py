"""What is left of it where windows are counted in rollouts: planned micro-batches, and nothing is dropped.

    deepspeed --num_accelerators 2 tools/migrations/open_instruct/planned.py --trace planned.jsonl

The schedule moves by rollouts, and so it ends where the data ends.
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
from tools.migrations.open_instruct.task import BATCHES, PACK, built, generated, mean, sequence_parallel, sliced

CONFIG = Path(__file__).with_name("planned_config.json")


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
    rollouts = [one for batch in generated(1 if probe else BATCHES) for one in batch]
    plan = ds_parity.plan(rollouts, dp_world_size=ranks, target=engine.window.target, max_tokens=PACK)
    for batch in engine.passes(ds_parity.micro_batches(plan, rank)):
        loss = engine(**batch.inputs)
        engine.backward(loss * sp)
        watch.ran(batch, loss / max(batch.tokens, 1))
        engine.step()
        watch.stepped()
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, sp=(1, "ranks that share a sequence"))
    deepspeed.init_distributed()
    say("planned", train(given.config, given.sp, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
