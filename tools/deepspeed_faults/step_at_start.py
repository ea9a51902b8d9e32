"""ZeRO 0 in bf16 and fp16: the optimizer is stepped once while an engine is built, and Adam is a step ahead.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/step_at_start.py

So that the optimizer has its states, the wrapper steps it once by gradients of zeros (runtime/fp16/unfused_optimizer.py
and fused_optimizer.py): weight decay is applied, and Adam's bias correction is one step ahead, so that the first step
is 0.74 times as long.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import allow_fp16, exit_code, tell

RATE = 0.25


def share(stage: int, precision: str) -> float:
    """Return how far Adam's first step moves a weight, as a share of the rate: 1, whatever the gradient."""
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        precision: {"enabled": True},
    }
    if precision == "fp16":
        config["fp16"]["loss_scale"] = 1.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    weight = next(engine.module.parameters())
    engine.backward(engine(torch.ones(1, 8, dtype=weight.dtype, device=weight.device)).sum())
    engine.step()
    return weight.detach().abs().max().item() / RATE


def main() -> dict[str, str]:
    """Take Adam's first step without ZeRO, and with it."""
    deepspeed.init_distributed()
    allow_fp16()
    return tell(
        {f"ZeRO {stage} in {name}": partial(share, stage, name) for stage in (0, 1) for name in ("bf16", "fp16")},
        said=lambda value: f"Adam's first step is {value:.3f} times the rate",
        right=lambda value: abs(value - 1) < 0.02,
        fault=lambda value: abs(value - 0.744) < 0.02,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
