"""What is left of it with ds_parity.

    deepspeed --num_accelerators 2 tools/from_pipelinerl/after.py --trace after.jsonl

`--quotas` keeps PipelineRL's preprocessor, so that the passes are the same and the steps can be compared bit for bit.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch.distributed as dist
from quotas import deal, packed
from task import Task, arguments, rewards, say

import ds_parity
from ds_parity.errors import DsParityError
from ds_parity.planning.rollout import MicroBatch
from ds_parity.trace import read_trace


def train(task: Task, quotas: bool = False) -> Any:
    """Train; returns the engine."""
    config = task.config | {"ds_parity": {**task.config.get("ds_parity", {}), "trace": str(task.trace)}}
    model, optimizer, scheduler = task.build()
    engine, *_ = ds_parity.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    stream = dealt(task) if quotas else planned(task)
    for micro_batch in engine.passes(ds_parity.to_device(one, engine.device) for one in stream):
        engine.record("reward", rewards(micro_batch.held))
        engine.backward(engine(**micro_batch.inputs))
        engine.step()
    return engine


def planned(task: Task) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches by a plan."""
    rollouts = [rollout for window in task.windows() for rollout in window]
    plan = ds_parity.plan(rollouts, dp_world_size=dist.get_world_size(), target=task.target, max_tokens=task.max_tokens)
    return ds_parity.micro_batches(plan, dist.get_rank())


def dealt(task: Task) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches by quotas, and one that holds nothing where PipelineRL sends a sentinel."""
    for window in task.windows():
        for row in deal(window, dist.get_world_size(), packed(task.max_tokens)):
            yield ds_parity.collate(row[dist.get_rank()], layout="packed")


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments and train; 2 for bad input."""
    try:
        task, given = arguments(__doc__, argv, quotas="deal rollouts as PipelineRL does")
        deepspeed.init_distributed()
        engine = train(task, given.quotas)
        steps = read_trace(task.trace).steps if dist.get_rank() == 0 else ()
        say("after", engine, engine.micro_steps, sum(step.idle_passes or 0 for step in steps))
        engine.destroy()
    except DsParityError as error:
        print(f"after.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
