"""ZeRO 1 without `contiguous_gradients`: experts on different ranks are trained by each other's gradients.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/experts_not_contiguous.py

Without that key, gradients are reduced over all data-parallel ranks, those of experts, too, of which each rank has
others (runtime/zero/stage_1_and_2.py, buffered_reduce_fallback). ZeRO 2 asserts that the key is on
(_configure_moe_settings).
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups

PLACES = {
    "ZeRO 1": {"stage": 1},
    "ZeRO 1 without contiguous_gradients": {"stage": 1, "contiguous_gradients": False},
}


class Model(torch.nn.Module):
    """Two experts, one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = MoE(4, torch.nn.Linear(4, 4), num_experts=2, ep_size=2, k=1, use_rts=False, min_capacity=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        return self.layer(x)[0].pow(2).sum()


def apart(zero: dict[str, object]) -> float:
    """Return how far a step moves the one expert otherwise than the other."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    model = Model()
    experts = [one for one in model.parameters() if is_moe_param(one)]
    before = torch.cat([one.detach().flatten() for one in experts]).clone()
    optimizer = torch.optim.SGD(in_groups({"params": list(model.parameters()), "name": "all"}), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    engine.backward(engine(x.to(engine.device)))
    engine.step()
    moved = torch.cat([one.detach().flatten() for one in experts]).cpu() - before
    moves = [None] * dist.get_world_size()
    dist.all_gather_object(moves, moved)
    return (moves[0] - moves[1]).abs().max().item()


def main() -> dict[str, str]:
    """Train with each setting."""
    deepspeed.init_distributed()
    return tell(
        {place: partial(apart, zero) for place, zero in PLACES.items()},
        said=lambda value: (
            f"a step moves the experts {value:.1e} apart; right is more than 0, as each has its gradient"
        ),
        right=lambda value: value > 1e-3,
        fault=lambda value: value < 1e-6,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
