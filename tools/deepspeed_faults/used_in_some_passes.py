"""A parameter that only early passes of a window use: ZeRO 1 with overlap_comm, ZeRO 2 and 3 with CPU offload lose it.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/used_in_some_passes.py

Its gradient is reduced (overlap_comm on stage 1) or copied to the CPU (offload) by the hook of the boundary's backward,
which does not run where the boundary's pass leaves the parameter out (stage_1_and_2.py, stage3.py).
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


def ends(zero: dict) -> list[float]:
    """Return how far both ends of the second branch move in two passes of which the first uses it; rank r has 2 r."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    model = Branches()
    torch.nn.init.zeros_(model.sometimes.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for both in (True, False):
        loss = engine(torch.ones(1, 8, device=get_accelerator().current_device_name()), both)
        engine.backward(2.0 * deepspeed.comm.get_rank() * loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved = (-engine.module.sometimes.weight[0, [0, -1]]).tolist()
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Take a step in each configuration. Needs two ranks or more."""
    deepspeed.init_distributed()
    right = (deepspeed.comm.get_world_size() - 1) / 2
    offload = {"offload_optimizer": {"device": "cpu"}}
    places = {f"ZeRO {stage}": partial(ends, {"stage": stage}) for stage in range(4)}
    places["ZeRO 1 with overlap_comm"] = partial(ends, {"stage": 1, "overlap_comm": True})
    places |= {f"ZeRO {stage} with CPU offload": partial(ends, {"stage": stage, **offload}) for stage in (1, 2, 3)}
    return tell(
        places,
        said=lambda moved: f"the ends move by {moved[0]:g} and {moved[1]:g}, right is {right:g}",
        right=lambda moved: moved == [right, right],
        fault=lambda moved: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
