"""ZeRO 1 to 3 step another Adagrad than the one that they were given: without its schedulers, groups and class.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/adagrad_built_anew.py

Adagrad makes its states when it is built. So that there are some for its flat partitions, DeepSpeed builds a new one of
the defaults of the first (runtime/zero/stage_1_and_2.py and stage3.py, initialize_optimizer_states), and steps that.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell

RATE = 0.5


def moved(stage: int) -> float:
    """Return how far a weight moves in a step whose scheduler has set the rate to 0."""
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    engine.backward(engine(torch.ones(1, 8, device=engine.device)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight.detach().abs().max().item()


def main() -> dict[str, str]:
    """Take a step on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(moved, stage) for stage in (0, 1, 2, 3)},
        said=lambda far: f"a step at a rate of 0 moves the weight by {far:g}",
        right=lambda far: far == 0,
        fault=lambda far: abs(far - RATE) < 1e-3,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
