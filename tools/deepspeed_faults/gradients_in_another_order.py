"""ZeRO 1 with overlap_comm, and ZeRO 2: ranks that use the same parameters in another order train each as the other.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/gradients_in_another_order.py

Gradients are reduced in buckets, in the order in which they come in (stage_1_and_2.py, reduce_ipg_grads), which is the
reverse of the order in which branches ran. A rank that runs the branch that it does not want first, and multiplies it
by 0, so that all ranks use all parameters, still has another order than a rank that wants that branch. ZeRO 3 gathers
weights in that order as well: there a forward may compute with another weight, or wait for ever. One rank alone shows
nothing.
"""

import sys
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


class Branches(torch.nn.Module):
    """Two weights, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 1, bias=False) for _ in range(2))
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Use the first (0) or the second (1)."""
        return (self.first, self.second)[number](x).sum()


def moves(**zero: Any) -> list[float]:
    """Return how far each weight moves where rank 0 trains the first by 1 and rank 1 the second by 3.

    Each rank runs the branch of the other rank first, times 0.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    model = Branches()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = dist.get_rank() % 2
    x = torch.ones(1, 4, device=get_accelerator().current_device_name())
    unwanted = 0.0 * engine(x, 1 - rank)
    engine.backward(unwanted + (1, 3)[rank] * engine(x, rank))
    engine.step()
    moved = [-weight.mean().item() for weight in engine.module.parameters()]
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Measure on ZeRO 0 to 2."""
    return tell(
        {
            "ZeRO 0": partial(moves, stage=0),
            "ZeRO 1": partial(moves, stage=1),
            "ZeRO 1 with overlap_comm": partial(moves, stage=1, overlap_comm=True),
            "ZeRO 2": partial(moves, stage=2),
        },
        said=lambda moved: f"the weights move by {moved[0]:g} and {moved[1]:g}; right is 0.5 and 1.5",
        right=lambda moved: moved == [0.5, 1.5],
        fault=lambda moved: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
