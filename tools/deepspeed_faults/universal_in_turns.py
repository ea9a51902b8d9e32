"""ZeRO 1 and 2 with round_robin_gradients: a universal checkpoint has the weights of other parameters.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/universal_in_turns.py

The option deals the parameters to the ranks in turns. Each rank's part of the flat weights and moments is cut as if
parameters lay there in the order of the model (_link_all_hp_params of runtime/zero/stage_1_and_2.py), and the converter
writes under the name of one what belongs to others. A load cuts in the same way, so that the same ranks with the same
setting do not show it; other numbers of ranks, for which universal checkpoints are made, do. No message says so.
"""

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import deepspeed
import torch
from _places import exit_code, tell
from _universal import converted


def built(stage: int, in_turns: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over five weights of different sizes."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True, "weight_decay": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "round_robin_gradients": in_turns},
    }
    torch.manual_seed(0)
    sizes = (4, 3, 5, 2, 6, 3)
    model = torch.nn.Sequential(*(torch.nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def written(folder: str) -> dict[str, torch.Tensor]:
    """Return the weights of a universal checkpoint, by name."""
    files = Path(folder, "universal", "zero").glob("*/fp32.pt")
    return {path.parent.name: torch.load(path, weights_only=False)["param"] for path in files}


def apart(stage: int, in_turns: bool) -> float:
    """Return how far the converted weights are from those that were saved, beside their length."""
    engine = built(stage, in_turns)
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).pow(2).mean())
    engine.step()
    with converted(engine) as folder:
        found = written(folder)
    saved = dict(engine.module.named_parameters())
    assert found.keys() == saved.keys()
    return max(((found[name] - one.detach().cpu()).norm() / one.norm()).item() for name, one in saved.items())


def main() -> dict[str, str]:
    """Save and convert with either setting."""
    deepspeed.init_distributed()
    cells = [(stage, in_turns) for stage in (1, 2) for in_turns in (False, True)]
    return tell(
        {f"ZeRO {one}, {'on' if on else 'off'}": partial(apart, one, on) for one, on in cells},
        said=lambda value: f"a converted weight is {value:.3f} of its length away from the saved one",
        right=lambda value: value < 1e-6,
        fault=lambda value: value > 1e-2,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
