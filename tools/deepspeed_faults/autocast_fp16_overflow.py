"""torch_autocast fp16 on ZeRO 1 to 3: after an overflow the loss scale never comes down, and training stands still.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/autocast_fp16_overflow.py

`step()` sees the overflow by the norm and returns before GradScaler.step and GradScaler.update (stage_1_and_2.py,
stage3.py), so the scale stays at 65536 and every later step overflows in the same way. ZeRO 0 backs off. Of the
versions that were measured 0.19.8 alone does so; up to 0.19.5 the scale comes down.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, forget_autocast, scaler_of, tell
from deepspeed.accelerator import get_accelerator

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
    forget_autocast()  # see autocast_outlives_its_engine.py
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    at, moved = 0.0, 0
    for _ in range(STEPS):
        one = torch.ones(1, 8, device=get_accelerator().current_device_name())
        engine.backward(2.0 * engine(one).float().sum())  # 2 * 65536 is more than fp16 holds
        engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            now = engine.module.weight.mean().item()
        at, moved = now, moved + (now != at)
    scale = scaler_of(engine).get_scale()
    engine.destroy()
    forget_autocast()
    return moved, scale


def main() -> dict[str, str]:
    """Take six steps on each stage; the fault never gets over the overflow."""
    return tell(
        {f"ZeRO {stage}": partial(steps_taken, stage) for stage in range(4)},
        said=lambda found: (
            f"{found[0]} of {STEPS} steps taken, loss scale {found[1]:g}; right is {STEPS - 2} and 16384"
        ),
        right=lambda found: found == (STEPS - 2, 16384),
        fault=lambda found: found[0] == 0,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
