"""A pipeline: of several weights that stages share, one that a stage does not use gets the gradient of another one.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/tied_weights_unused.py

Behind the passes each stage adds up over the stages what gradients it has of shared weights, in their order, and passes
over a weight that has none (runtime/pipe/engine.py, _exec_reduce_tied_grads). Where one stage uses the first of two
weights and another one the second, the two gradients are added to each other, and the stages' copies come apart. Where
one uses both, it waits.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.pipe import PipelineModule, TiedLayerSpec


class Two(torch.nn.Module):
    """Two weights of one shape, of which a forward uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(8))
        self.second = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the first one."""
        return x * self.first


def by_the_second(two: Two, x: torch.Tensor) -> torch.Tensor:
    """Return the product with the second one."""
    return x * two.second


def apart(stage: int) -> float:
    """Take a step, and return how far the two copies of the first weight are apart."""
    tied = partial(TiedLayerSpec, "two", Two, tied_weight_attr=["first", "second"])
    layers = [tied(), tied(forward_fn=by_the_second)]
    model = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=lambda out, _: out.pow(2).mean())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.ones((1, 8), device=engine.device)
    engine.train_batch(iter([(x, x)]))
    weight = engine.module.tied_modules["two"].first.detach()
    most, least = weight.clone(), weight.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float((most - least).max())


def main() -> dict[str, str]:
    """Take a step on ZeRO 0 and 1."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(apart, stage) for stage in (0, 1)},
        said=lambda found: f"the copies of a shared weight are {found:g} apart; 0 is right",
        right=lambda found: found == 0,
        fault=lambda found: found > 0.01,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
