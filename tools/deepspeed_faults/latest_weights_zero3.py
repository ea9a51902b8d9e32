"""ZeRO 3: load_checkpoint(tag=..., load_optimizer_states=False) loads the weights that `latest` names.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/latest_weights_zero3.py

The fp32 weights are collected from the folder without the tag (runtime/engine.py, _load_checkpoint); counts, and the
LR scheduler, are those of the tag. Without a file `latest` it is a ValueError.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(stage: int, value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over weights of a value."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def weight(engine: deepspeed.DeepSpeedEngine) -> float:
    """Return the weight."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight.mean().item()


def loaded(stage: int) -> float:
    """Return the weight of an engine that has loaded the older of two checkpoints, of weights 5 and then 7."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        folder = folders[0]
        for tag, value in (("older", 5.0), ("newer", 7.0)):
            built(stage, value).save_checkpoint(folder, tag=tag)
        engine = built(stage, 1.0)
        engine.load_checkpoint(folder, tag="older", load_optimizer_states=False)
        dist.barrier()  # the first rank removes the folder
    return weight(engine)


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(loaded, stage) for stage in range(4)},
        said=lambda value: f"the weight is {value:g} after loading the older checkpoint; right is 5",
        right=lambda value: value == 5,
        fault=lambda value: value == 7,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
