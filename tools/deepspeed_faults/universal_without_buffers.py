"""ZeRO 1 to 3: a universal checkpoint is loaded without the model's buffers and frozen weights, and without an error.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/universal_without_buffers.py

With `load_universal` a load passes over the model's own state (runtime/engine.py, _load_checkpoint: load_module_state_
dict only `if not self.load_universal_checkpoint()`), and reads the parameters of the optimizer alone. The running
statistics of a norm, and the frozen part of a model, are those that the new engine began with.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from _universal import converted


class Model(torch.nn.Module):
    """A layer with a buffer and a frozen weight of one value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.frozen = torch.nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("mean", torch.full((2,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        return (self.layer(x) * self.frozen + self.mean).pow(2).sum()


def built(stage: int, value: float, universal: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over the model."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    }
    model = Model(value)
    trained = list(model.layer.parameters())
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def loaded(stage: int, universal: bool) -> tuple[float, float]:
    """Save a model of fives, and load it into one of ones: return its buffer and its frozen weight."""
    engine = built(stage, 5.0, False)
    engine.backward(engine(torch.ones(1, 4, device=engine.device)))
    engine.step()
    with converted(engine) as folder:
        other = built(stage, 1.0, universal)
        other.load_checkpoint(folder, tag="universal" if universal else "saved")
    with deepspeed.zero.GatheredParameters([other.module.frozen], enabled=stage == 3):
        frozen = float(other.module.frozen[0])
    return float(other.module.mean[0]), frozen


def main() -> dict[str, str]:
    """Load it on each stage, as it is and converted."""
    deepspeed.init_distributed()
    kinds = {"as it is": False, "universal": True}
    return tell(
        {f"ZeRO {stage}, {name}": partial(loaded, stage, kind) for stage in (1, 2, 3) for name, kind in kinds.items()},
        said=lambda found: f"the buffer is {found[0]:g}, the frozen weight {found[1]:g}; 5 and 5 were saved",
        right=lambda found: found == (5.0, 5.0),
        fault=lambda found: found == (1.0, 1.0),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
