"""ZeRO 3: where one backward brings the gradient of a parameter twice, the second gradient replaces the first.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/reached_twice.py

Reentrant activation checkpointing runs a backward of its own for each use of a block, so a block that is used twice in
a forward, or in two forwards for one backward, gets two gradients. In the first pass of a step each is copied into the
same partition (stage3.py, partition_grads: `micro_step_id == 0`), unless both lie in one bucket, where an assertion
without a message raises (__reduce_and_partition_ipg_grads). ZeRO 2, and 1 with overlap_comm, raise in any case.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator
from torch.utils.checkpoint import checkpoint


class Twice(torch.nn.Module):
    """Multiplies by a weight twice, each time in a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.between = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the block before and after another one, which fills the bucket."""
        once = checkpoint(self.block, x, use_reentrant=True)
        return checkpoint(self.block, checkpoint(self.between, once, use_reentrant=True), use_reentrant=True).sum()


def moves(stage: int) -> float:
    """Return how far the block's first weight moves in a step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64},
    }
    model = Twice()
    for layer in (model.block, model.between):
        torch.nn.init.eye_(layer.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ones = torch.ones(1, 8, device=get_accelerator().current_device_name(), requires_grad=True)
    engine.backward(engine(ones))
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        after = engine.module.block.weight[0, 0].item()
    engine.destroy()
    return 1 - after


def main() -> dict[str, str]:
    """Take a step on each stage."""
    return tell(
        {f"ZeRO {stage}": partial(moves, stage) for stage in range(4)},
        said=lambda found: f"moves by {found:g}; right is 2, once for each use",
        right=lambda found: found == 2,
        fault=lambda found: found == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
