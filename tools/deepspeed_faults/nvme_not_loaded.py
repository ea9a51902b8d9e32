"""ZeRO 3: a checkpoint of an optimizer on NVMe is loaded without its count of steps and its learning rates.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/nvme_not_loaded.py

It needs libaio. With the optimizer's states on NVMe load_checkpoint (runtime/engine.py) leaves out
_load_zero_checkpoint, and copies the swapped files alone: what is below 1 MB, and so not swapped, is not loaded either.
No message says so. A second save under a tag ends in a FileExistsError, behind the other files.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import NotThere, exit_code, tell
from deepspeed.ops.op_builder import AsyncIOBuilder


def built(device: str, rate: float, folder: str) -> deepspeed.DeepSpeedEngine:
    """Return an engine whose optimizer lies on NVMe, or on the CPU."""
    offload = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
    }
    model = torch.nn.Linear(4, 1, bias=False)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def loaded_rate(device: str) -> float:
    """Return the learning rate behind a load of what ran at a rate of 0.5, in an engine that was built with 0.25."""
    if device == "nvme" and not AsyncIOBuilder().is_compatible(verbose=False):
        raise NotThere("libaio can't be found here")
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as swapped:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        engine = built(device, 0.5, swapped)
        engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
        engine.step()
        engine.save_checkpoint(folders[0], tag="saved")
        other = built(device, 0.25, swapped)
        other.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
        return float(other.optimizer.param_groups[0]["lr"])


def main() -> dict[str, str]:
    """Save and load with the optimizer on the CPU, and on NVMe."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO 3, {device}": partial(loaded_rate, device) for device in ("cpu", "nvme")},
        said=lambda value: f"the learning rate is {value:g} behind the load; right is 0.5",
        right=lambda value: value == 0.5,
        fault=lambda value: value == 0.25,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
