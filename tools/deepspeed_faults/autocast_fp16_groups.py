"""torch_autocast fp16 on ZeRO 1 to 3: where the loss scale grows, later parameter groups are applied at half size.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/autocast_fp16_groups.py

`_optimizer_step` calls GradScaler.step and GradScaler.update once a group (once a sub-group on ZeRO 3). An update in
the middle of a step doubles the scale, and what comes after it is unscaled by the new one. It also counts groups as
steps, so the scale grows as many times too soon. ZeRO 0 updates once.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, forget_autocast, scaler_of, tell
from deepspeed.accelerator import get_accelerator


def updates(stage: int) -> list[float]:
    """Return the updates of two parameters of two groups, with gradient 0.25, at a step where the scale grows."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    forget_autocast()  # see autocast_outlives_its_engine.py
    model = torch.nn.ModuleList(torch.nn.Linear(8, 1, bias=False) for _ in range(2))
    model.forward = lambda x: model[0](x) + model[1](x)
    for part in model:
        torch.nn.init.zeros_(part.weight)
    groups = [{"params": [part.weight]} for part in model]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    scaler_of(engine).set_growth_interval(1)  # 2000 by default
    one = torch.ones(1, 8, device=get_accelerator().current_device_name())
    engine.backward(0.25 * engine(one).float().sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved = [-parameter.mean().item() for parameter in engine.module.parameters()]
    engine.destroy()
    forget_autocast()
    return moved


def main() -> dict[str, str]:
    """Take one step on each stage."""
    return tell(
        {f"ZeRO {stage}": partial(updates, stage) for stage in range(4)},
        said=lambda moved: (
            f"two groups with gradient 0.25 move by {moved[0]:g} and {moved[1]:g}; right is 0.25 for both"
        ),
        right=lambda moved: moved == [0.25, 0.25],
        fault=lambda moved: moved == [0.25, 0.125],
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
