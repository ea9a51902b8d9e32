"""A pipeline on ZeRO 1: a universal checkpoint is loaded without its stages' frozen weights, and without an error.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/universal_without_layers.py

A pipeline saves each layer in a file of its own, and the conversion copies the files of ranks alone
(checkpoint/ds_to_universal.py: `mp_rank_files`). With `load_universal` the load reads the parameters of the optimizer
(runtime/engine.py, _load_checkpoint). What no optimizer steps, frozen weights and buffers, is in no file that is read:
it stays as the new engine began.
"""

import sys
from functools import partial

import deepspeed
import torch
from _pipelines import two_stages
from _places import exit_code, tell
from _universal import converted
from deepspeed.pipe import LayerSpec


class Scale(torch.nn.Module):
    """Multiplies by a weight and a frozen one of one value, and adds a buffer of it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.frozen = torch.nn.Parameter(torch.full((8,), value), requires_grad=False)
        self.register_buffer("mean", torch.full((8,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product and the sum."""
        return x * self.weight * self.frozen + self.mean


def loaded(universal: bool) -> tuple[float, float]:
    """Save a model of fives, and load it into one of ones: return a buffer of this stage and a frozen weight."""
    engine = two_stages([LayerSpec(Scale, 5.0) for _ in range(4)], universal=False)
    x = torch.ones((1, 8), device=engine.device)
    engine.train_batch(iter([(x, x)]))
    with converted(engine) as folder:
        other = two_stages([LayerSpec(Scale, 1.0) for _ in range(4)], universal=universal)
        other.load_checkpoint(folder, tag="universal" if universal else "saved")
    state = other.module.forward_funcs[0].state_dict()
    return float(state["mean"][0]), float(state["frozen"][0])


def main() -> dict[str, str]:
    """Load it as it is and converted."""
    deepspeed.init_distributed()
    return tell(
        {name: partial(loaded, kind) for name, kind in {"ZeRO 1, as it is": False, "ZeRO 1, universal": True}.items()},
        said=lambda found: f"the buffer is {found[0]:g}, the frozen weight {found[1]:g}; 5 and 5 were saved",
        right=lambda found: found == (5.0, 5.0),
        fault=lambda found: found == (1.0, 1.0),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
