"""A parameter that is frozen after it was trained goes on moving, by momentum or by weight decay.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/frozen_still_moves.py

torch's optimizers leave out a parameter without a gradient. ZeRO's flat groups, and the wrappers of bf16 and fp16, give
it a gradient of zeros (stage_1_and_2.py, stage3.py, unfused_optimizer.py), and the optimizer steps by that: momentum,
Adam's moments and weight decay go on. ZeRO 0 in fp32 is torch's own optimizer, and right.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator

CASES = {"momentum": {"lr": 1.0, "momentum": 0.5}, "weight decay": {"lr": 1.0, "weight_decay": 0.5}}


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


def moves(stage: int, offload: bool, bf16: bool, case: str) -> list[float]:
    """Return how far the toggled weight moves in a step that trains it, and in one for which it is frozen."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "SGD", "params": CASES[case]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
    }
    model = Pair()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(1, 8, device=get_accelerator().current_device_name(), dtype=next(model.parameters()).dtype)
    places = [0.0]
    for trained in (True, False):
        engine.module.toggled.weight.requires_grad_(trained)
        engine.backward(engine(x))
        engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            places.append(-engine.module.toggled.weight.float().mean().item())
    engine.destroy()
    return [places[1], places[2] - places[1]]


def main() -> dict[str, str]:
    """Take two steps in each configuration."""
    cells = [(stage, offload, False) for stage in range(4) for offload in (False, True)[: 1 + (stage > 0)]]
    cells += [(stage, False, True) for stage in range(4)]
    return tell(
        {
            f"ZeRO {stage}{' in bf16' if bf16 else ''}{' with CPU offload' if offload else ''}, {case}": partial(
                moves, stage, offload, bf16, case
            )
            for case in CASES
            for stage, offload, bf16 in cells
        },
        said=lambda moved: (
            f"moves by {moved[0]:g} in the step that trains it, {moved[1]:g} in the one for which it is frozen; "
            "right is 1 and 0"
        ),
        right=lambda moved: moved == [1, 0],
        # With CPU offload the last gradient is applied again, too (stale_gradient.py).
        fault=lambda moved: moved[0] == 1 and moved[1] != 0,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
