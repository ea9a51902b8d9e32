"""ZeRO 3: load_checkpoint(load_module_only=True) loads nothing, and returns the path as if it had.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/module_only_zero3.py

The weights of ZeRO 3 are in the optimizer's files, which load_module_only leaves out (engine.py, load_checkpoint).
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(stage: int, value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over one weight of a value."""
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
    """Return the weight of an engine that has loaded the module of one whose weight was 5."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        folder = folders[0]
        built(stage, 5.0).save_checkpoint(folder, tag="saved")
        engine = built(stage, 1.0)
        path, _ = engine.load_checkpoint(folder, tag="saved", load_module_only=True)
        assert path is not None
        dist.barrier()  # the first rank removes the folder
    return weight(engine)


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(loaded, stage) for stage in range(4)},
        said=lambda value: f"the weight is {value:g} after loading; right is 5",
        right=lambda value: value == 5,
        fault=lambda value: value == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
