"""A gradient that is read by torch.autograd.grad through engine(x) is divided by gradient_accumulation_steps.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/gradient_read_scaled.py

DeepSpeed takes every backward through what `engine(x)` has returned for a step of training: a hook divides it
(_backward_prologue_per_tensor of runtime/engine.py), raises on ZeRO 0, and begins a reduction on ZeRO 1 and 2, which
finds nothing and raises later on some of them. So adversarial inputs are others, and a gradient penalty enters the step
with another weight.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell

STEPS = 4


def read_beside_true(stage: int) -> float:
    """Return the gradient of an input as it is read through the engine, beside the one through the module."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": STEPS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    norms = []
    for forward in (engine.module, engine):
        x = torch.ones(1, 4, device=engine.device, requires_grad=True)
        (gradient,) = torch.autograd.grad(forward(x).pow(2).mean(), x)
        norms.append(gradient.norm().item())
    return norms[1] / norms[0]


def main() -> dict[str, str]:
    """Read the gradient of an input on every stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(read_beside_true, stage) for stage in (0, 1, 2, 3)},
        said=lambda value: f"what is read is {value:.4g} times the gradient",
        right=lambda value: abs(value - 1) < 1e-5,
        fault=lambda value: abs(value - 1 / STEPS) < 1e-5,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
