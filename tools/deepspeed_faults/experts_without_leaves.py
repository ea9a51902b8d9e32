"""ZeRO 3: where ranks use different experts in a pass, weights and gradients of one are taken for another's.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/experts_without_leaves.py

Weights are gathered as modules run (partitioned_param_coordinator.py), and gradients reduced in the order of their
bucket (stage3.py, __avg_scatter_grads): each rank gives its part of the expert that it runs itself. Of the same size
they are put together without an error. A leaf module (deepspeed.utils.set_z3_leaf_modules) gathers and reduces all
experts together, and is right. One rank alone shows nothing.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator

WIDTH = 4


class Experts(torch.nn.Module):
    """Two experts, of which a call uses one: the first multiplies by 1, the second by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        with torch.no_grad():
            for number, expert in enumerate(self.experts, start=1):
                expert.weight.copy_(number * torch.eye(WIDTH))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return what an expert says, (WIDTH,)."""
        return self.experts[number](x)


class Model(torch.nn.Module):
    """What has a layer of experts: a model that is a leaf itself has no module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Experts()

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return what an expert says, (WIDTH,)."""
        return self.layer(x, number)


def said(leaf: bool) -> tuple[list[float], list[list[float]]]:
    """Return how far each expert's weights have moved, on the mean, and what each rank's expert says of ones."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = Model()
    before = [expert.weight.detach().clone() for expert in model.layer.experts]
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = dist.get_rank() % 2
    output = engine(torch.ones(WIDTH, device=get_accelerator().current_device_name(), requires_grad=True), rank)
    engine.backward((1, 3)[rank] * output.sum())
    engine.step()
    answers: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(answers, output.tolist())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        after = [expert.weight.detach().cpu().clone() for expert in model.layer.experts]
    moved = [float((one - other).mean()) for one, other in zip(before, after, strict=True)]
    engine.destroy()
    return moved, answers[:2]


RIGHT = ([0.5, 1.5], [[1.0] * WIDTH, [2.0] * WIDTH])


def main() -> dict[str, str]:
    """Measure."""
    return tell(
        {"ZeRO 3": partial(said, leaf=False), "ZeRO 3 with a leaf module": partial(said, leaf=True)},
        said=lambda found: f"the experts move by {found[0]} and say {found[1]}; right is {RIGHT[0]} and {RIGHT[1]}",
        right=lambda found: found == RIGHT,
        fault=lambda found: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
