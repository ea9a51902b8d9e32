"""ZeRO 2: what a `custom_load_fn` makes of a frozen weight is replaced by what was saved.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/frozen_by_function.py

ZeRO 2 saves a copy of each frozen weight beside the model's state, and a load writes it to the model behind the
function (runtime/engine.py, load_module_state_dict). On ZeRO 0 and 1 there is no copy, and what the function makes
stays, as it does for each weight that is trained.
"""

import sys
import tempfile
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(stage: int, value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over a model with a frozen weight of a value."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1))
    torch.nn.init.constant_(model[0].weight.requires_grad_(False), value)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def doubled(src: dict[str, torch.Tensor], dst: Any) -> None:
    """Load twice each weight."""
    dst.load_state_dict({name: 2 * value for name, value in src.items()})


def loaded(stage: int) -> float:
    """Return the frozen weight of an engine that has loaded 5 by a function which doubles it."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        built(stage, 5.0).save_checkpoint(folders[0], tag="saved")
        engine = built(stage, 1.0)
        engine.load_checkpoint(folders[0], tag="saved", load_optimizer_states=False, custom_load_fn=doubled)
        dist.barrier()  # the first rank removes the folder
    return engine.module[0].weight.mean().item()


def main() -> dict[str, str]:
    """Load on each stage that gives a function whole weights."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(loaded, stage) for stage in range(3)},
        said=lambda value: f"the frozen weight is {value:g}; right is 10, which the function makes of 5",
        right=lambda value: value == 10,
        fault=lambda value: value == 5,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
