"""fp16 on ZeRO 0: engine.backward does not scale the loss, but the step divides by the loss scale.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/fp16_zero0_unscaled_loss.py

`engine.backward` scales for a ZeROOptimizer only (runtime/engine.py); FP16_Optimizer and FP16_UnfusedOptimizer of stage
0 are none, and their own backward(), which scales, is never called. The update is 1 / loss_scale of what it should be.
Adam hides it (until epsilon and underflow show); SGD, weight decay beside it, and clipping do not.
"""

import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

SCALE = 256.0
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {"enabled": True, "loss_scale": SCALE},
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "zero_optimization": {"stage": 0},
}


def main() -> bool:
    """Take one step on a loss whose gradient is 1; return whether the fault is there."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # DeepSpeed's CPU accelerator says no, torch computes it all the same
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    one = torch.ones(1, 1, dtype=torch.float16, device=accelerator.current_device_name())
    engine.backward(engine(one).sum())
    engine.step()
    update = -engine.module.weight.item()
    engine.destroy()
    fault = update != 1.0
    print(
        f"fp16, ZeRO 0, SGD with lr 1, gradient 1: the update is {update:g}, right is 1 (1 / loss scale: {1 / SCALE:g})"
    )
    print("FAULT" if fault else "fixed in this version")
    return fault


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
