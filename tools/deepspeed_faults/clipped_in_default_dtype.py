"""ZeRO 0 in fp32: under a default dtype of half precision, gradients are clipped to another norm.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/clipped_in_default_dtype.py

The coefficient of the gradients is made of `torch.tensor([max_norm])`, in torch's default dtype, and that of a tensor
with a dimension goes before that of the norm, which has none (runtime/utils.py, clip_grad_norm_). In bf16 it has 8
digits in binary.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell

PLACES = {
    "ZeRO 0, by default fp32": (0, torch.float32),
    "ZeRO 0, by default bf16": (0, torch.bfloat16),
    "ZeRO 1, by default bf16": (1, torch.bfloat16),
}


def update(stage: int, default: torch.dtype) -> float:
    """Return how far a step at a rate of 1 goes that is clipped to a norm of 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float32)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.set_default_dtype(default)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(torch.ones(1, 3, dtype=torch.float32, device=engine.device)).sum())
        engine.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return (engine.module.weight.detach().cpu() - before).norm().item()


def main() -> dict[str, str]:
    """Clip under each default."""
    deepspeed.init_distributed()
    return tell(
        {place: partial(update, *place_of) for place, place_of in PLACES.items()},
        said=lambda value: f"the step goes {value:.5f} far; right is 1",
        right=lambda value: abs(value - 1) < 1e-5,
        fault=lambda value: 1e-4 < abs(value - 1) < 1e-2,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
