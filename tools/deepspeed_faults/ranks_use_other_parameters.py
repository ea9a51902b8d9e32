"""ZeRO 1 and 2: where ranks use different parameters in a pass, gradients of one are added to those of another.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/ranks_use_other_parameters.py

Gradients are reduced in buckets, in the order in which they come in (stage_1_and_2.py, reduce_ipg_grads): the adapter
of one rank meets that of the other. Of the same size they are averaged without an error; of other sizes gloo ends the
process. One rank alone shows nothing.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


class Adapters(torch.nn.Module):
    """Two weights, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 1, bias=False) for _ in range(2))
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Use the first (0) or the second (1)."""
        return (self.first, self.second)[number](x).sum()


def moves(stage: int) -> list[float]:
    """Return how far each weight moves where rank 0 trains the first by 1 and rank 1 the second by 3."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = Adapters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = dist.get_rank() % 2
    x = torch.ones(1, 4, device=get_accelerator().current_device_name())
    engine.backward((1, 3)[rank] * engine(x, rank))
    engine.step()
    moved = [-weight.mean().item() for weight in engine.module.parameters()]
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Measure on ZeRO 0 to 2."""
    return tell(
        {f"ZeRO {stage}": partial(moves, stage) for stage in range(3)},
        said=lambda moved: f"the weights move by {moved[0]:g} and {moved[1]:g}; right is 0.5 and 1.5",
        right=lambda moved: moved == [0.5, 1.5],
        fault=lambda moved: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
