"""ZeRO 1 to 3: a universal checkpoint of another model, or of other parameter groups, is loaded without an error.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/universal_of_others.py

A universal checkpoint has one folder for each parameter, and a load reads the folders of the parameters which its own
model has (load_hp_checkpoint_state of checkpoint/universal_checkpoint.py). The number of elements is all that has to
fit, on ZeRO 3 the saved ones may be fewer, and what nobody asks for is passed over. The settings of the parameter
groups are given out by the place of a group, not by its parameters. A checkpoint that is not converted is compared
strictly.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from _universal import converted

SAVED = {"matrix": (6, 4), "bias": (4,)}
RATES = {"matrix": 0.1, "bias": 0.2}
CASES = {
    "the same": (SAVED, False),
    "groups in another order": (SAVED, True),
    "another shape": (SAVED | {"matrix": (4, 6)}, False),
    "a parameter less": ({"matrix": (6, 4)}, False),
}


class Model(torch.nn.Module):
    """The sum of the squares of all its parameters."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.ones(shape)))

    def forward(self) -> torch.Tensor:
        """Return the sum."""
        return sum(one.pow(2).sum() for one in self.parameters())


def built(stage: int, shapes: dict[str, tuple[int, ...]], reverse: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over parameters of these shapes, each in a group of its own with a learning rate of its own."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True, "weight_decay": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": True},
    }
    model = Model(shapes)
    groups = [{"params": [one], "lr": RATES[name]} for name, one in model.named_parameters()]
    given = groups[::-1] if reverse else groups
    return deepspeed.initialize(model=model, model_parameters=given, config=config)[0]


def loaded(stage: int, shapes: dict[str, tuple[int, ...]], reverse: bool) -> tuple[bool, str]:
    """Save, convert and load, and return whether that ended as it has to, and how."""
    engine = built(stage, SAVED, False)
    engine.backward(engine())
    engine.step()
    with converted(engine) as folder:
        other = built(stage, shapes, reverse)
        try:
            other.load_checkpoint(folder, tag="universal")
        except (ValueError, RuntimeError) as error:
            ended = f"it is refused: {type(error).__name__}"
        else:
            ended = f"it is loaded, the first group's learning rate is {other.optimizer.param_groups[0]['lr']}"
    same = shapes == SAVED and not reverse
    return ("loaded" if same else "refused") in ended, ended


def main() -> dict[str, str]:
    """Load each case on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}, {name}": partial(loaded, stage, *case) for stage in (1, 2, 3) for name, case in CASES.items()},
        said=lambda value: value[1],
        right=lambda value: value[0],
        fault=lambda value: not value[0],
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
