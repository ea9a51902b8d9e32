"""ZeRO 0 in bf16: a checkpoint has no state of the optimizer, and loads none: the next step undoes what was loaded.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/checkpoint_bf16_zero0.py

Before 0.18.5 a checkpoint in bf16 is taken for one of ZeRO, whose optimizer has files of its own (runtime/engine.py,
`zero_optimizer_state` in _save_checkpoint, `has_zero_optimizer_state` in _load_checkpoint), and nothing writes or reads
these on ZeRO 0. The weights in fp32 that a step changes, and momentum, stay those of the engine that loads.
"""

import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over weights of a value, whose steps change nothing."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def loaded() -> float:
    """Return the weight, one step at a rate of 0 after an engine of 1 has loaded the checkpoint of one of 5."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        built(5.0).save_checkpoint(folders[0], tag="saved")
        engine = built(1.0)
        engine.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16, device=engine.device)).sum())
    engine.step()
    return engine.module.weight.mean().item()


def main() -> dict[str, str]:
    """Load, and step."""
    deepspeed.init_distributed()
    return tell(
        {"ZeRO 0 in bf16": loaded},
        said=lambda value: f"the weight is {value:g} after loading and a step at a rate of 0; right is 5",
        right=lambda value: value == 5,
        fault=lambda value: value == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
