"""ZeRO 1 and 2: a universal checkpoint does not load where a rank's part of a parameter group is padding alone.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/universal_empty_partition.py

A group of few elements, such as one bias, ends before the part of the last rank begins. The load takes the count of
steps from the first parameter of the part (runtime/base_optimizer.py, load_hp_checkpoint_state_from_checkpoint_dir),
and raises an IndexError on that rank, for which the others wait.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from _universal import converted


def built(stage: int) -> deepspeed.DeepSpeedEngine:
    """Return an engine over a layer, whose one bias is a parameter group of its own."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def raised(stage: int) -> str:
    """Return what ranks raise that load the states, with which they do not wait for each other; "" for nothing."""
    saved = built(stage)
    saved.backward(saved(torch.ones(1, 4, device=saved.device)).pow(2).mean())
    saved.step()
    error = ""
    with converted(saved) as folder:
        engine = built(stage)
        try:
            engine.optimizer.load_hp_checkpoint_state_from_checkpoint_dir("bit16_groups", f"{folder}/universal")
        except IndexError as found:
            error = f"rank {dist.get_rank()} raises IndexError: {found}"
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next(filter(None, errors), "")


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(raised, stage) for stage in (1, 2)},
        said=lambda error: error or "every rank loads",
        right=lambda error: not error,
        fault=lambda error: "IndexError" in error,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
