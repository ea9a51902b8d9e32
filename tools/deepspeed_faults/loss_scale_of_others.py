"""ZeRO 1 to 3 in fp16: a checkpoint of a run without fp16 puts its loss scale of 1 in the place of this one's.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/loss_scale_of_others.py

A load takes the scaler that was saved (_load_global_state of runtime/zero/stage_1_and_2.py, load_state_dict of
runtime/zero/stage3.py). That of fp32 and bf16 is 1 and never grows, so that in fp16 gradients below 6e-8 are nothing.
No error shows. Universal checkpoints of bf16 do the same.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import allow_fp16, exit_code, tell


def built(stage: int, *, fp16: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine whose loss scale begins at 1024, if it is in fp16."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": fp16, "initial_scale_power": 10},
    }
    model = torch.nn.Linear(8, 1)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def loaded(stage: int) -> float:
    """Return the loss scale behind a load."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        built(stage, fp16=False).save_checkpoint(folders[0], tag="saved")
        engine = built(stage, fp16=True)
        engine.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
    return float(engine.optimizer.loss_scale)


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    allow_fp16()
    return tell(
        {f"ZeRO {stage}, in fp16": partial(loaded, stage) for stage in (1, 2, 3)},
        said=lambda scale: f"the loss scale is {scale:g} behind the load; right is 1024",
        right=lambda scale: scale == 1024,
        fault=lambda scale: scale == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
