"""torch_autocast fp16 stays on for every later ZeRO engine of the process, whatever its configuration says.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/autocast_outlives_its_engine.py

`init_autocast_params` sets two module globals (runtime/torch_autocast.py), nothing clears them, and ZeRO asks them in
place of its configuration. A later fp32 or bf16 engine gets a GradScaler, and with clipping its steps are 1 / 65536 of
what they should be (autocast_fp16_clipping.py); one in fp16 has two loss scales, one times the other, and its gradients
overflow. An engine that was built before asks the globals in each backward, too: in bf16 with `communication_data_type`
fp32 it raises a KeyError. A process with a policy and a critic has two engines.
"""

import sys

import deepspeed
import torch
from _places import exit_code, forget_autocast, tell
from deepspeed.accelerator import get_accelerator

PLAIN = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}


def update(config: dict) -> float:
    """Return the size of one step on a gradient of norm 2, clipped at 1."""
    model = torch.nn.Linear(64, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ones = torch.ones(1, 64, device=get_accelerator().current_device_name())
    engine.backward(0.25 * engine(ones).float().sum())
    engine.step()
    moved = engine.module.weight.norm().item()
    engine.destroy()
    return moved


def before_and_after() -> tuple[float, float]:
    """Return the step of a plain engine before one with autocast was built, and after it."""
    forget_autocast()
    before = update(PLAIN)
    update({**PLAIN, "torch_autocast": {"enabled": True, "dtype": "float16"}})
    after = update(PLAIN)
    forget_autocast()
    return before, after


def main() -> dict[str, str]:
    """Build a plain fp32 engine, one with autocast, and the plain one again."""
    return tell(
        {"ZeRO 2": before_and_after},
        said=lambda steps: (
            f"a plain fp32 engine steps by {steps[0]:g} before an autocast engine was built, by {steps[1]:g} after it; "
            "right is 1"
        ),
        right=lambda steps: min(steps) > 0.9,
        fault=lambda steps: steps[0] > 0.9 and steps[1] < 0.1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
