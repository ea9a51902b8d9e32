"""A checkpoint saved between boundaries holds no gradients and no place in the window, and says nothing about it.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/checkpoint_mid_window.py

save_checkpoint writes neither the accumulated gradients nor micro_steps (runtime/engine.py): the first step of the
engine that loads it lacks the passes before the save.
"""

import os
import sys
import tempfile
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def update(stage: int, folder: str, resumed: bool) -> float:
    """Return the update of three passes with gradients 1, 2 and 4, over 3; the last may run in a resumed engine."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }

    def build() -> deepspeed.DeepSpeedEngine:
        model = torch.nn.Linear(8, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    engine = build()
    for size in (1.0, 2.0, 4.0):
        if resumed and size == 4.0:
            engine.save_checkpoint(folder, tag=f"{stage}")
            engine.destroy()
            engine = build()
            engine.load_checkpoint(folder, tag=f"{stage}")
            engine.set_gradient_accumulation_boundary(True)  # else it would wait for three passes more
        engine.backward(size * engine(torch.ones(1, 8, device=get_accelerator().current_device_name())).sum())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved = -engine.module.weight.mean().item()
    engine.destroy()
    return moved


def both(stage: int, folder: str) -> list[float]:
    """Return the update of a window, and of one that is saved and resumed."""
    return [update(stage, folder, resumed) for resumed in (False, True)]


def main() -> dict[str, str]:
    """Compare a window that is saved and resumed with one that is not."""
    folder = f"{tempfile.gettempdir()}/deepspeed_faults_{os.environ.get('MASTER_PORT')}"  # the same on every rank
    return tell(
        {f"ZeRO {stage}": partial(both, stage, folder) for stage in range(4)},
        said=lambda moved: (
            f"the window moves the weight by {moved[0]:g}, saved and resumed in it by {moved[1]:g}; right is 2.33333"
        ),
        right=lambda moved: all(abs(one - 7 / 3) < 1e-6 for one in moved),
        fault=lambda moved: abs(moved[0] - 7 / 3) < 1e-6 and abs(moved[1] - 4 / 3) < 1e-6,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
