"""torch_autocast fp16 on ZeRO 1 to 3: after an overflow the loss scale never comes down, and training stands still.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/autocast_fp16_overflow.py

`step()` sees the overflow by the norm and returns before GradScaler.step and GradScaler.update (stage_1_and_2.py,
stage3.py), so the scale stays at 65536 and every later step overflows in the same way. ZeRO 0 backs off.
"""

import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast

STEPS = 6


def steps_taken(stage: int) -> tuple[int, float]:
    """Return how many of some steps moved the weight, and the loss scale after them; the scale must fall by 4."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # see autocast_outlives_its_engine.py
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    at, moved = 0.0, 0
    for _ in range(STEPS):
        one = torch.ones(1, 1, device=get_accelerator().current_device_name())
        engine.backward(2.0 * engine(one).float().sum())  # 2 * 65536 is more than fp16 holds
        engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            now = engine.module.weight.item()
        at, moved = now, moved + (now != at)
    scaler = engine.torch_autocast_z0_gradscaler or engine.optimizer.torch_autocast_gradscaler
    scale = scaler.get_scale()
    engine.destroy()
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    return moved, scale


def main() -> bool:
    """Take six steps on each stage; return whether ZeRO 1, 2 and 3 never get over the overflow."""
    measured = [steps_taken(stage) for stage in range(4)]
    for stage, (moved, scale) in enumerate(measured):
        print(f"ZeRO {stage}: {moved} of {STEPS} steps taken, loss scale {scale:g}; right is {STEPS - 2} and 16384")
    fault = all(moved == 0 for moved, _ in measured[1:])
    print("FAULT" if fault else "fixed in this version")
    return fault


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
