"""ZeRO 1 and 2: a parameter stays untrained where a universal checkpoint has lost the file of its weights.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/universal_without_a_file.py

A load takes what it finds in the folder of a parameter (checkpoint/universal_checkpoint.py, load_hp_checkpoint_state:
os.listdir), and does not miss fp32.pt, which has the weights. They are those that the new engine began with, and the
moments are those that were saved. Nothing raises. ZeRO 3 looks for each file by its name.
"""

import sys
from functools import partial
from pathlib import Path

import deepspeed
import torch
from _places import exit_code, tell
from _universal import converted


def built(stage: int, value: float, *, universal: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over a layer of one value."""
    model = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.constant_(model.weight, value)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def loaded(stage: int, whole: bool) -> int | None:
    """Save a layer of fives, and load it into one of ones: return what that has; None where the load raises."""
    engine = built(stage, 5.0, universal=False)
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
    engine.step()
    with converted(engine) as folder:
        if not whole:
            Path(folder, "universal", "zero", "weight", "fp32.pt").unlink()
        other = built(stage, 1.0, universal=True)
        try:
            other.load_checkpoint(folder, tag="universal")
        except FileNotFoundError:
            return None
    with deepspeed.zero.GatheredParameters([other.module.weight], enabled=stage == 3):
        return round(float(other.module.weight[0, 0]))


def main() -> dict[str, str]:
    """Load it on each stage, whole and without the file."""
    deepspeed.init_distributed()
    kinds = {"whole": True, "without fp32.pt": False}
    return tell(
        {f"ZeRO {stage}, {name}": partial(loaded, stage, kind) for stage in (1, 2, 3) for name, kind in kinds.items()},
        said=lambda found: "the load raises" if found is None else f"the weights are {found}; 5 were saved",
        right=lambda found: found in (5, None),
        fault=lambda found: found == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
