"""fp16 on ZeRO 0: engine.backward does not scale the loss, but the step divides by the loss scale.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/fp16_zero0_unscaled_loss.py

`engine.backward` scales for a ZeROOptimizer only (runtime/engine.py); FP16_Optimizer and FP16_UnfusedOptimizer of stage
0 are none, and their own backward(), which scales, is never called. The update is 1 / loss_scale of what it should be.
Adam hides it (until epsilon and underflow show); SGD, weight decay beside it, and clipping do not.
"""

import sys

import deepspeed
import torch
from _places import allow_fp16, exit_code, tell
from deepspeed.accelerator import get_accelerator

SCALE = 256.0
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {"enabled": True, "loss_scale": SCALE},
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "zero_optimization": {"stage": 0},
}


def update() -> float:
    """Return the update of a step on a loss whose gradient is 1, at a learning rate of 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    one = torch.ones(1, 1, dtype=torch.float16, device=get_accelerator().current_device_name())
    engine.backward(engine(one).sum())
    engine.step()
    moved = -engine.module.weight.item()
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Take one step on a loss whose gradient is 1."""
    allow_fp16()
    return tell(
        {"ZeRO 0": update},
        said=lambda moved: (
            f"fp16, SGD with lr 1, gradient 1: the update is {moved:g}, right is 1 (1 / loss scale: {1 / SCALE:g})"
        ),
        right=lambda moved: moved == 1,
        fault=lambda moved: moved < 0.1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
