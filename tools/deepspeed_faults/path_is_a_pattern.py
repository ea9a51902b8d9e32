"""ZeRO 0 to 3: the folder and the tag of a checkpoint are read as a pattern; `run[1]` loads what `run1` has.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/path_is_a_pattern.py

A load looks for the files of the model by `glob`, with the folder and the tag in the pattern (runtime/engine.py,
_get_all_ckpt_names; runtime/pipe/module.py, ckpt_layer_path_list). A checkpoint below `lr=[0.1]` is saved, and not
found again. On ZeRO 0, whose checkpoint is these files alone, that of a neighbour is loaded, and nothing is raised.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell


def built(stage: int) -> deepspeed.DeepSpeedEngine:
    """Return an engine over a few weights."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 1)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def steps_of(stage: int, beside: bool) -> str:
    """Save behind one step as run1, if it is to be beside, and behind two as run[1]; return what a load of that has."""
    engine = built(stage)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("run1", "run[1]"):
            engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
            engine.step()
            if beside or name == "run[1]":
                engine.save_checkpoint(f"{folder}/{name}", tag="t")
        other = built(stage)
        try:
            other.load_checkpoint(f"{folder}/run[1]", tag="t")
        except AssertionError:
            return "nothing is found, and a bare AssertionError is raised"
        return f"the checkpoint of step {other.global_steps} is loaded"


def main() -> dict[str, str]:
    """Load it on each stage without a neighbour, and on ZeRO 0 beside one."""
    cases = {f"ZeRO {stage}, alone": (stage, False) for stage in range(4)} | {"ZeRO 0, beside run1": (0, True)}
    return tell(
        {name: partial(steps_of, *case) for name, case in cases.items()},
        said=lambda found: f"of run[1], saved behind step 2, {found}",
        right=lambda found: "step 2" in found,
        fault=lambda found: "step 2" not in found,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
