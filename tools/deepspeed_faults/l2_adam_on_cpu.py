"""DeepSpeed's Adam on a CPU: weight decay is decoupled, as AdamW's is, though `adam_w_mode` is false.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/l2_adam_on_cpu.py

Up to 0.19.5 csrc/cpu/adam/fused_adam.cpp creates its optimizer once, in the other mode (DeepSpeed #8307). With CPU
offload another kernel steps, which is right.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator

PARAMETERS = {"lr": 0.1, "weight_decay": 0.5}


def torch_moves() -> float:
    """Return how far torch's Adam moves a weight of 1 by a gradient of 1."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight], **PARAMETERS).step()
    return 1 - weight.item()


def ratio_to_torch(stage: int) -> float:
    """Return how far DeepSpeed's moves it, over how far torch's does."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {**PARAMETERS, "adam_w_mode": False}},
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, 4, device=get_accelerator().current_device_name())).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved = 1 - engine.module.weight.mean().item()
    engine.destroy()
    return moved / torch_moves()


def main() -> dict[str, str]:
    """Measure on each stage."""
    return tell(
        {f"ZeRO {stage}": partial(ratio_to_torch, stage) for stage in range(4)},
        said=lambda ratio: f"a step moves the weight {ratio:.2f} times as far as torch's Adam",
        right=lambda ratio: abs(ratio - 1) < 1e-4,
        fault=lambda ratio: abs(ratio - 1.5) < 1e-4,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
