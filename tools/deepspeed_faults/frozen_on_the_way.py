"""A parameter that is frozen inside a window, or for whole windows with CPU offload, or unfrozen after the start.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/frozen_on_the_way.py

Three cases, none with an error. Frozen for the last pass of a window, its gradient of the earlier passes is lost on
ZeRO 3 (and with CPU offload on ZeRO 2). Frozen for whole windows, CPU offload applies its last gradient again and
again (nothing clears the buffers of what a window leaves out). Frozen while the engine is built and trained later, ZeRO
1 to 3 compute its gradient and never apply it (their flat groups hold what required a gradient at the start).
"""

import itertools
import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


class Pair(torch.nn.Module):
    """Two weights, both used in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.toggled = (torch.nn.Linear(8, 1, bias=False) for _ in range(2))
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        return self.always(x).sum() + self.toggled(x).sum()


def moves(stage: int, offload: bool, flags: list[list[bool]]) -> list[float]:
    """Return how far the toggled weight moves in each window, given whether each of its passes trains it."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": len(flags[0]),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
    }
    model = Pair()
    model.toggled.weight.requires_grad_(flags[0][0])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x, places = torch.ones(1, 8, device=get_accelerator().current_device_name()), [0.0]
    for window in flags:
        for flag in window:
            engine.module.toggled.weight.requires_grad_(flag)
            engine.backward(engine(x))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            places.append(-engine.module.toggled.weight.mean().item())
    engine.destroy()
    return [after - before for before, after in itertools.pairwise(places)]


CASES = {
    "frozen in the last pass": ([[True, False]], [0.5]),
    "frozen for a window": ([[True], [False]], [1, 0]),
    "unfrozen later": ([[False], [True]], [0, 1]),
}


def found(stage: int, offload: bool, flags: list[list[bool]], right: list[float]) -> tuple[list[float], list[float]]:
    """Return how far the weight moves, and how far it should."""
    return moves(stage, offload, flags), right


def main() -> dict[str, str]:
    """Run each case on each stage."""
    cells = [(stage, offload) for stage in range(4) for offload in (False, True)[: 1 + (stage > 0)]]
    return tell(
        {
            f"ZeRO {stage}{' with CPU offload' if offload else ''}, {name}": partial(found, stage, offload, *case)
            for name, case in CASES.items()
            for stage, offload in cells
        },
        said=lambda moved: f"moves by {moved[0]}; right is {moved[1]}",
        right=lambda moved: moved[0] == moved[1],
        fault=lambda moved: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
