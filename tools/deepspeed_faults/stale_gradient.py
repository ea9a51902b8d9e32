"""ZeRO 3, and ZeRO 1 to 3 with CPU offload: a parameter that a step does not use is moved by its last gradient again.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/stale_gradient.py

Gradients are copied over what a buffer held before, and only where there is one (stage3.py, partition_grads and
independent_gradient_partition_epilogue; stage_1_and_2.py, single_partition_of_fp32_groups with CPU offload). Nothing
clears the buffers of parameters that were left out: a model with branches trains on old gradients, in silence.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


class Branches(torch.nn.Module):
    """The sum of both weights, or the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = (torch.nn.Linear(8, 1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        """Use the second branch or leave it out."""
        return self.always(x).sum() + (self.sometimes(x).sum() if both else 0.0)


def moves(stage: int, offload: bool) -> list[float]:
    """Return how far the second branch moves in a step that uses it, and in the one after it, which doesn't."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
    }
    model = Branches()
    torch.nn.init.zeros_(model.sometimes.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    places = [0.0]
    for both in (True, False):
        engine.backward(engine(torch.ones(1, 8, device=get_accelerator().current_device_name()), both))
        engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            places.append(-engine.module.sometimes.weight.mean().item())
    engine.destroy()
    return [places[1] - places[0], places[2] - places[1]]


def main() -> dict[str, str]:
    """Take two steps on each stage."""
    return tell(
        {
            f"ZeRO {stage}{' with CPU offload' if offload else ''}": partial(moves, stage, offload)
            for stage in range(4)
            for offload in (False, True)[: 1 + (stage > 0)]
        },
        said=lambda found: (
            f"moves by {found[0]:g} in the step that uses it, {found[1]:g} in the one that does not; right is 1 and 0"
        ),
        right=lambda found: found == [1, 0],
        fault=lambda found: found == [1, 1],
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
