"""A pipeline on ZeRO 1: stages with other numbers of parameter groups wait for each other for ever.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/norms_of_stages.py

A step adds up one norm for each parameter group over the stages (runtime/zero/stage_1_and_2.py, scaled_global_norm and
get_grad_norm_direct). Where the biases are a group of their own, and a stage has none, it takes part in fewer of these
sums than the others, which wait for it.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.pipe import LayerSpec, PipelineModule


def sums() -> float:
    """Take a step, and return how many sums more one stage takes part in than the other."""
    layers = [LayerSpec(torch.nn.Linear, 8, 8, bias=True), LayerSpec(torch.nn.Linear, 8, 8, bias=False)]
    model = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=lambda out, _: out.pow(2).mean())
    weights = [one for one in model.parameters() if one.dim() > 1]
    biases = [one for one in model.parameters() if one.dim() == 1]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    groups = [{"params": one} for one in (weights, biases) if one]
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    counted: list[torch.Tensor] = []
    # Counted and not sent, so that this script ends: the first stage would wait for ever for its second sum.
    engine.optimizer._model_parallel_all_reduce = lambda tensor, op: counted.append(tensor)
    x = torch.ones((1, 8), device=engine.device)
    engine.train_batch(iter([(x, x)]))
    most, least = (torch.tensor(float(len(counted)), device=engine.device) for _ in range(2))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(most - least)


def main() -> dict[str, str]:
    """Take a step of both stages."""
    deepspeed.init_distributed()
    return tell(
        {"ZeRO 1": sums},
        said=lambda found: f"sums that one stage waits for and the other has no part in: {found:g}; 0 is right",
        right=lambda found: found == 0,
        fault=lambda found: found == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
