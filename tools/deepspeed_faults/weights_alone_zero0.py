"""ZeRO 0 in bf16 and fp16: load_checkpoint(load_optimizer_states=False) loads weights that the next step undoes.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/weights_alone_zero0.py

A step changes weights in fp32 and copies them to the model. Without the optimizer's states the model's weights are
loaded and these are not (runtime/engine.py, _load_checkpoint), though load_module_only=True refreshes them.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import allow_fp16, exit_code, tell


def built(precision: str, value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over weights of a value, whose steps change nothing."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        precision: {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    if precision == "fp16":
        config["fp16"]["loss_scale"] = 1.0
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def loaded(precision: str) -> float:
    """Return the weight, one step at a rate of 0 after an engine of 1 has loaded the weights of one of 5."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        built(precision, 5.0).save_checkpoint(folders[0], tag="saved")
        engine = built(precision, 1.0)
        engine.load_checkpoint(folders[0], tag="saved", load_optimizer_states=False)
        dist.barrier()  # the first rank removes the folder
    weight = engine.module.weight
    engine.backward(engine(torch.ones(1, 8, dtype=weight.dtype, device=weight.device)).sum())
    engine.step()
    return weight.mean().item()


def main() -> dict[str, str]:
    """Load weights alone in both precisions, and step."""
    deepspeed.init_distributed()
    allow_fp16()
    return tell(
        {f"ZeRO 0 in {precision}": partial(loaded, precision) for precision in ("bf16", "fp16")},
        said=lambda value: f"the weight is {value:g} after loading and a step at a rate of 0; right is 5",
        right=lambda value: value == 5,
        fault=lambda value: value == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
