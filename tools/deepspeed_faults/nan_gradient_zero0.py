"""ZeRO 0 in fp32: a gradient that is not finite makes every weight NaN, where ZeRO 1 to 3 skip the step.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/nan_gradient_zero0.py

ZeRO 1 to 3 look at the norm in every precision (stage_1_and_2.py and stage3.py, step); torch's own optimizer, which
ZeRO 0 uses in fp32, does not, and the clipping multiplies all gradients by NaN. Up to 0.19.5 ZeRO 1 to 3 take the step
in fp32, too.
"""

import math
import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def weight_after_nan(stage: int, clip: float) -> float:
    """Return a weight after a step whose loss was NaN."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 1, bias=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(1, 4, device=get_accelerator().current_device_name())
    engine.backward(engine(x).sum() * math.nan)
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weight = engine.module.weight.mean().item()
    engine.destroy()
    return weight


def main() -> dict[str, str]:
    """Measure on each stage, with clipping and without."""
    return tell(
        {
            f"ZeRO {stage}{' with clipping' if clip else ''}": partial(weight_after_nan, stage, clip)
            for stage in range(4)
            for clip in (0.0, 1.0)
        },
        said=lambda weight: f"the weight is {weight:g} after a step of NaN; right is a number",
        right=math.isfinite,
        fault=math.isnan,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
