"""ZeRO 3: a checkpoint has nothing of a weight that is not frozen and is in no group of the optimizer.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/unstepped_not_saved.py

The files have what is frozen and what the optimizer steps (runtime/engine.py, _get_zero_frozen_param_attributes), and
in place of any other weight the model's part is an empty tensor. Behind load_checkpoint() such a weight is that of the
new engine's model, without an error.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(stage: int, value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine that steps the first layer of two; the second one's weights are of a value."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1, bias=False))
    torch.nn.init.constant_(model[1].weight, value)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def loaded(stage: int) -> float:
    """Return the weight of an engine whose model began with 1, behind a checkpoint of one with 5."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        built(stage, 5.0).save_checkpoint(folders[0], tag="saved")
        engine = built(stage, 1.0)
        engine.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
    weight = engine.module[1].weight
    with deepspeed.zero.GatheredParameters([weight] if stage == 3 else []):
        return weight.mean().item()


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(loaded, stage) for stage in range(4)},
        said=lambda value: f"the weight is {value:g} behind the load; right is 5",
        right=lambda value: value == 5,
        fault=lambda value: value == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
