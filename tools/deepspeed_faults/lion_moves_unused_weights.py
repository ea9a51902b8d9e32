"""Lion with CPU offload: a weight whose gradient has always been 0 moves by the learning rate, every step.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/lion_moves_unused_weights.py

Lion steps by the sign of its momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2), and the sign of 0 is 0. The
CPU kernel takes copysign(lr, momentum) (ops/csrc/lion/cpu_lion_impl.cpp), which is lr at 0: embedding rows of tokens
that no batch holds drift away together.
"""

import sys

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator

RATE = 0.001


def moved() -> list[float]:
    """Return how far a weight with gradient 1, one with gradient -1 and one with none move in a step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Lion", "params": {"lr": RATE}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.tensor([[1.0, -1.0, 0.0]], device=get_accelerator().current_device_name())).sum())
    engine.step()
    moves = [float(f"{value:.3g}") for value in engine.module.weight[0].tolist()]
    engine.destroy()
    return moves


def main() -> dict[str, str]:
    """Take one step."""
    deepspeed.init_distributed()
    return tell(
        {"ZeRO 2 with CPU offload": moved},
        said=lambda moves: f"gradients 1, -1 and 0 move their weights by {moves}; right is [{-RATE}, {RATE}, 0.0]",
        right=lambda moves: moves == [-RATE, RATE, 0],
        fault=lambda moves: moves[:2] == [-RATE, RATE] and moves[2] != 0,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
