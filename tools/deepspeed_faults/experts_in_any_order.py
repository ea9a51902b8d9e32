"""Experts of several `ep_size`: ranks have the groups of the optimizer in other orders, and add up other gradients.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/experts_in_any_order.py

DeepSpeed makes a parameter group for each `ep_size` in the order of a set of names (moe/utils.py,
split_params_into_different_moe_groups_for_optimizer), which follows from PYTHONHASHSEED: each process has another one,
unless it is told. ZeRO 1 and 2 reduce by the places of groups, so that ranks come to norms and weights of their own,
without an error; and a checkpoint is loaded in the order that the process happens to have. So that it does not depend
on the launch, the script gives each rank the order that a process has with some seed, which it looks for first.
"""

import os
import subprocess
import sys

import deepspeed
import torch
import torch.distributed as dist
from _places import NotThere, exit_code, tell
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

WIDTH, NAMES = 4, ("ep_size_1", "ep_size_2")


class Experts(torch.nn.Module):
    """A layer with all experts on each rank, and one with an expert on each of two."""

    def __init__(self) -> None:
        super().__init__()
        options = {"k": 1, "drop_tokens": False, "min_capacity": 0, "use_rts": False, "num_experts": 2}
        for size in (1, 2):
            setattr(self, f"of_{size}", MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH, bias=False), ep_size=size, **options))
        for number, weight in enumerate(self.parameters()):
            weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both layers say, in a row."""
        return self.of_2(self.of_1(x)[0])[0]


def norms(stage: int, orders: list[list[str]]) -> list[float]:
    """Return the norm of the gradient behind a step, of each rank."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = Experts()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    groups[1:] = sorted(groups[1:], key=lambda group: orders[dist.get_rank() % 2].index(group["name"]))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(groups, lr=0.1), config=config)
    for number in range(2):
        drawn = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x = torch.randn(6, WIDTH, generator=drawn).to(get_accelerator().current_device_name())
        engine.backward((engine(x) - 3).pow(2).mean())
        engine.step()
    found = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, float(engine.get_global_grad_norm()))
    engine.destroy()
    return found


def orders_by_seeds() -> list[list[str]]:
    """Return the orders that a set of both names has in processes with some seeds."""
    found = []
    for seed in range(20):
        command = [sys.executable, "-c", f"print(*{{{', '.join(map(repr, NAMES))}}})"]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        found += [] if said in found else [said]
    if len(found) < 2:
        raise NotThere("a set has one order in all processes")
    return sorted(found)


def main() -> dict[str, str]:
    """Measure."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": lambda stage=stage: norms(stage, orders_by_seeds()) for stage in (1, 2)},
        said=lambda found: f"ranks clip by the norms {', '.join(f'{one:.4g}' for one in found)}",
        right=lambda found: max(found) - min(found) < 1e-5 * max(found),
        fault=lambda found: max(found) - min(found) > 1e-3 * max(found),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
