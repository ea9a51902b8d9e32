"""ZeRO 2: every rank gets the frozen weights of the first rank's experts from a checkpoint (ep_size above 1).

    deepspeed --num_accelerators 2 tools/deepspeed_faults/frozen_experts.py

The model's file has a copy of each frozen weight of the rank that writes it, by its name there. Behind the load of the
model, in which each rank has got its own experts from their files, these copies replace what is frozen
(runtime/engine.py, load_module_state_dict). ZeRO 1 saves no copies.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups


class Expert(torch.nn.Module):
    """A frozen layer and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.trained = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        return self.frozen(x) + self.trained(x)


class Model(torch.nn.Module):
    """Two experts, one on each rank, with the rank in all frozen weights, or a value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = MoE(4, Expert(), num_experts=2, ep_size=2, k=1, use_rts=False, min_capacity=0)
        for one in self.layer.parameters():
            if not one.requires_grad:
                one.data.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        return self.layer(x)[0].sum()


def built(stage: int, value: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over experts with a frozen weight of this value."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    model = Model(value)
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = in_groups([{"params": trained, "name": "all"}])
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def loaded(stage: int) -> float:
    """Return the frozen weights of the second rank's expert behind a load; it has saved 2, and the first rank 1."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        folder = folders[0]
        built(stage, 1.0 + dist.get_rank()).save_checkpoint(folder)
        engine = built(stage, 7.0)
        engine.load_checkpoint(folder)
        dist.barrier()  # the first rank removes the folder
    mean = next(one for one in engine.module.layer.parameters() if not one.requires_grad).mean()
    means = [torch.zeros_like(mean) for _ in range(2)]
    dist.all_gather(means, mean.detach())
    return means[1].item()


def main() -> dict[str, str]:
    """Load on the stages that partition experts."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(loaded, stage) for stage in (1, 2)},
        said=lambda value: f"the second rank's expert has {value:g}; 2 was saved, and 1 by the first rank",
        right=lambda value: value == 2,
        fault=lambda value: value == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
