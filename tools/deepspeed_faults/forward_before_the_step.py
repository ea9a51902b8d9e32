"""ZeRO 1 to 3, and ZeRO 0 in bf16: the backward of a forward that lies in front of a step mixes old and new weights.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/forward_before_the_step.py

The optimizer wrappers write new weights through `.data`, which autograd does not see (stage_1_and_2.py and stage3.py,
step; bf16_optimizer.py, update_lp_params). A loop that runs the forward of the next window before the step of this one
gets the gradient of neither weights, and no error. Where torch's own optimizer steps the weights, torch raises.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def gradient(stage: int, precision: dict[str, object]) -> float:
    """Return the gradient of w1 in w2 * w1, whose forward ran where both were 1, behind a step that took them to 2."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **precision,
    }
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(1, 1, device=get_accelerator().current_device_name(), dtype=next(model.parameters()).dtype)
    late = engine(x).sum()
    engine.backward(-engine(x).sum())  # each gradient is -1, so that each weight comes to 2
    engine.step()
    engine.backward(late)
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved = 2 - engine.module[0].weight.float().item()
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Measure each stage in both precisions."""
    cells = {"": {}, " in bf16": {"bf16": {"enabled": True}}}
    places = {
        f"ZeRO {stage}{name}": partial(gradient, stage, more) for name, more in cells.items() for stage in range(4)
    }
    return tell(
        places,
        said=lambda moved: f"w1 moves by {moved:g}; the gradient at the forward's weights is 1, or it is an error",
        right=lambda moved: moved == 1,
        fault=lambda moved: moved == 2,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
