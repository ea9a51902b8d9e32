"""ZeRO 0, 1 and 3: zero_grad() before each pass drops what the passes before have accumulated.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/zero_grad_mid_window.py

It is what its name says, but a loop that was written for torch or accelerate calls it so, the counters go on, and no
error shows. ZeRO 2 has moved its gradients elsewhere by then, and is right.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def moved(stage: int) -> float:
    """Return by how much two passes with gradients 1 and 2 move a weight at a learning rate of 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(1, 4, device=get_accelerator().current_device_name())
    for factor in (1, 2):
        optimizer.zero_grad()
        engine.backward(factor * engine(x).sum())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moves = -engine.module.weight.mean().item()
    engine.destroy()
    return moves


def main() -> dict[str, str]:
    """Measure on each stage."""
    return tell(
        {f"ZeRO {stage}": partial(moved, stage) for stage in range(4)},
        said=lambda moves: f"moves by {moves:g}; the mean of both passes is 1.5",
        right=lambda moves: moves == 1.5,
        fault=lambda moves: moves == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
