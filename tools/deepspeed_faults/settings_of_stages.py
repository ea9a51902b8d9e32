"""A pipeline on ZeRO 1: a universal checkpoint gives every stage the settings of the first stage's parameter groups.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/settings_of_stages.py

The stages of a pipeline may have groups with other settings, such as a learning rate for each layer. The conversion
reads the groups of one file alone, and writes them into the one file of the optimizer (checkpoint/ds_to_universal.py,
_save_optimizer_state). Every stage loads that (load_hp_checkpoint_state_from_checkpoint_dir of
runtime/zero/stage_1_and_2.py), also where no number of stages has changed. The load raises nothing.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from _pipelines import two_stages
from _places import exit_code, tell
from _universal import converted
from deepspeed.pipe import LayerSpec


def apart() -> float:
    """Save stages with rates of their own, convert and load; return how many times a rate is off, up or down."""
    layers = [LayerSpec(torch.nn.Linear, 8, 8) for _ in range(4)]
    engine = two_stages(layers, universal=False)
    saved = 0.1 / (1 + engine.stage_id)
    for group in engine.optimizer.param_groups:
        group["lr"] = saved
    x = torch.ones((1, 8), device=engine.device)
    engine.train_batch(iter([(x, x)]))
    with converted(engine) as folder:
        other = two_stages(layers, universal=True)
        other.load_checkpoint(folder, tag="universal")
    loaded = other.optimizer.param_groups[0]["lr"]
    factor = torch.tensor(max(loaded / saved, saved / loaded), device=engine.device)
    dist.all_reduce(factor, op=dist.ReduceOp.MAX)
    return float(factor)


def main() -> dict[str, str]:
    """Load it on both stages."""
    deepspeed.init_distributed()
    return tell(
        {"ZeRO 1": apart},
        said=lambda found: f"a stage's rate and the one that it has saved are {found:g} times apart; 1 is right",
        right=lambda found: abs(found - 1) < 1e-6,
        fault=lambda found: abs(found - 2) < 1e-6,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
