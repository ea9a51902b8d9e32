"""On ZeRO 3, writing a weight or a state raises on the last ranks alone where ranks do not divide its size.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/weights_written_zero3.py

set_full_hp_param of runtime/zero/stage3.py takes a rank's part out of the value (`narrow`) as if it had the padding
that the partitions have. The first ranks have written theirs by then, and wait for the last where they meet next.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from _places import NotThere, exit_code, tell

ODD = 13


def ranks_that_raise(stage: int, write: Callable[[Any, torch.Tensor], None]) -> int:
    """Return how many ranks raise where all write a parameter of 13 elements."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, ODD)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).pow(2).mean())
    engine.step()  # so that there are states
    raised = 0
    try:
        write(engine.module.bias, torch.ones(ODD, device=engine.device))
    except RuntimeError:
        raised = 1
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, raised)
    return sum(map(int, every))


def weight(parameter: Any, value: torch.Tensor) -> None:
    """Write the weight."""
    deepspeed.utils.safe_set_full_fp32_param(parameter, value)


def state(parameter: Any, value: torch.Tensor) -> None:
    """Write the momentum."""
    deepspeed.utils.safe_set_full_optimizer_state(parameter, value, "exp_avg")


def main() -> dict[str, str]:
    """Write a weight and a state on the stages that divide them over ranks."""
    deepspeed.init_distributed()
    if not hasattr(deepspeed.utils, "safe_set_full_fp32_param"):
        raise NotThere("DeepSpeed writes no weights yet")
    return tell(
        {
            f"ZeRO {stage}, {name}": partial(ranks_that_raise, stage, write)
            for stage in (1, 2, 3)
            for name, write in (("a weight", weight), ("a state", state))
        },
        said=lambda value: f"{value} ranks raise",
        right=lambda value: value == 0,
        fault=lambda value: 0 < value < dist.get_world_size(),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
