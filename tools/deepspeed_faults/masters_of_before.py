"""ZeRO 1 in bf16 with fp32 accumulation: a load with `load_from_fp32_weights: false` is undone by the next step.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/masters_of_before.py

A step changes weights in fp32 and copies them to the model. With this key they are to be made of the model's weights in
the checkpoint, as the wrapper of plain bf16 does (_restore_from_bit16_weights of runtime/zero/stage_1_and_2.py). The
other one leaves them as they were (runtime/bf16_optimizer.py, _load_legacy_checkpoint).
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell

SUMMED = {"data_types": {"grad_accum_dtype": "fp32"}}
PLACES = {
    "ZeRO 1 in bf16": (1, {}),
    "ZeRO 1 in bf16 with fp32 accumulation": (1, SUMMED),
    "ZeRO 2 in bf16": (2, {}),
}


def built(stage: int, more: dict[str, object], value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over weights of a value, whose steps change nothing."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "load_from_fp32_weights": False},
        "zero_allow_untested_optimizer": True,
        **more,
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def step(engine: deepspeed.DeepSpeedEngine) -> float:
    """Return the weight behind a step at a rate of 0."""
    weight = engine.module.weight
    engine.backward(engine(torch.ones(1, 8, dtype=weight.dtype, device=weight.device)).sum())
    engine.step()
    return weight.mean().item()


def loaded(stage: int, more: dict[str, object]) -> float:
    """Return the weight, one step at a rate of 0 after an engine of 1 has loaded the checkpoint of one of 5."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        saving = built(stage, more, 5.0)
        step(saving)  # makes the states that are saved
        saving.save_checkpoint(folders[0], tag="saved")
        engine = built(stage, more, 1.0)
        engine.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
    return step(engine)


def main() -> dict[str, str]:
    """Load with each wrapper, and step."""
    deepspeed.init_distributed()
    return tell(
        {place: partial(loaded, *place_of) for place, place_of in PLACES.items()},
        said=lambda value: f"the weight is {value:g} after loading and a step at a rate of 0; right is 5",
        right=lambda value: value == 5,
        fault=lambda value: value == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
