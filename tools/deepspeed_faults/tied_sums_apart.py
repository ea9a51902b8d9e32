"""A pipeline on ZeRO 1 in bf16, with fp32 accumulation and CPU offload: stages step a tied weight apart.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/tied_sums_apart.py

A gradient is moved from `grad` to `grad_accum` behind each backward (runtime/zero/stage_1_and_2.py), and the stages of
a tied layer add up `grad` (runtime/pipe/engine.py, _exec_reduce_tied_grads), which is None by then. Each stage steps
the weight by its own part of the gradient, and from then on they have different ones.
"""

import sys
from functools import partial
from typing import Any

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


class Scale(torch.nn.Module):
    """Multiplies by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x * self.weight


def stepped(stage_of: tuple[dict[str, Any], dict[str, Any]]) -> float:
    """Take one step of SGD with a rate of 1; return how far the tied weight has moved, on this rank's stage."""
    more, zero = stage_of
    layers = [TiedLayerSpec("scale", Scale), LayerSpec(Scale), LayerSpec(Scale), TiedLayerSpec("scale", Scale)]
    model = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=lambda out, _: out.sum() / 64)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1, **zero},
        **more,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.full((1, 8), 8.0, dtype=torch.bfloat16, device=engine.device)
    engine.train_batch(iter([(x, x)]))
    moved = 1.0 - float(engine.module.tied_modules["scale"].weight[0])
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Take the step with fp32 accumulation, with offload, and with both: 1/8 of each stage."""
    deepspeed.init_distributed()
    kinds = {
        "in bf16, with fp32 accumulation": (SUMS, {}),
        "in bf16, with CPU offload": ({}, OFFLOADED),
        "in bf16, with fp32 accumulation and CPU offload": (SUMS, OFFLOADED),
    }
    return tell(
        {f"ZeRO 1 {name}": partial(stepped, kind) for name, kind in kinds.items()},
        said=lambda found: f"the tied weight moves by {found:g}; 0.25 is the sum over both stages",
        right=lambda found: abs(found - 0.25) < 0.01,
        fault=lambda found: abs(found - 0.125) < 0.01,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
