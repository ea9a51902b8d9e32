"""ZeRO 3: weights that hooks of a module's state convert are not what was saved where weights are loaded alone.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/converted_twice.py

With load_optimizer_states=False the weights are put together of the ranks' parts, which no hook has seen, and given to
`load_state_dict()` (runtime/engine.py, _load_checkpoint), whose hooks convert them once more than the save has. A
module that packs weights into one tensor of its state finds none there, and keeps what it has. Neither is an error.
"""

import sys
import tempfile
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


class Model(torch.nn.Module):
    """A weight, which is twice as large in the module's state."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), value))
        self._register_state_dict_hook(double)
        self.register_load_state_dict_pre_hook(halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        return (self.weight * x).sum()


def double(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Convert the weight where it is saved."""
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2


def halve(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert it back where it is loaded."""
    state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


def built(stage: int, value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over weights of a value."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    model = Model(value)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def loaded(stage: int) -> float:
    """Return the weight of an engine over ones that has loaded a checkpoint of fives."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        folder = folders[0]
        built(stage, 5.0).save_checkpoint(folder)
        engine = built(stage, 1.0)
        engine.load_checkpoint(folder, load_optimizer_states=False)
        dist.barrier()  # the first rank removes the folder
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight.mean().item()


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(loaded, stage) for stage in range(4)},
        said=lambda value: f"the weight is {value:g}; 5 was saved",
        right=lambda value: value == 5,
        fault=lambda value: value == 2.5,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
