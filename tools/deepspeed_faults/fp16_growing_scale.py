"""fp16 with a dynamic loss scale: the step at which the scale grows is applied at half its size (ZeRO 0 to 3).

    deepspeed --num_accelerators 1 tools/deepspeed_faults/fp16_growing_scale.py

`step()` calls `_update_scale` first and unscales after it by the new scale, which the losses of that step never saw
(stage_1_and_2.py, stage3.py, fused_optimizer.py, unfused_optimizer.py). ZeRO 1 and 2 report the right norm all the
same, ZeRO 3 half of it. Every `loss_scale_window` steps one step is lost by half.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import allow_fp16, exit_code, tell
from deepspeed.accelerator import get_accelerator

STEPS = 6


def updates(stage: int) -> tuple[list[float], list[float]]:
    """Return each step's update and reported norm, over the first step's; the gradient is always 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 2},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    one = torch.ones(1, 8, dtype=torch.float16, device=get_accelerator().current_device_name())
    at, sizes, norms = 0.0, [], []
    for _ in range(STEPS):
        engine.backward(engine(one).sum())
        engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            sizes.append(at - engine.module.weight.float().mean().item())
        at -= sizes[-1]
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return [size / sizes[0] for size in sizes], [norm / norms[0] for norm in norms]


def main() -> dict[str, str]:
    """Take six steps on each stage."""
    allow_fp16()
    return tell(
        {f"ZeRO {stage}": partial(updates, stage) for stage in range(4)},
        said=lambda found: f"updates {found[0]}, norms {found[1]}; right is 1.0 in every place",
        right=lambda found: set(found[0] + found[1]) == {1.0},
        fault=lambda found: min(found[0][1:]) <= 0.5,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
