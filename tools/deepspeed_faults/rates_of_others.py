"""ZeRO 0 to 3: behind a load without the optimizer's states, or the scheduler's, the learning rate is another one's.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/rates_of_others.py

A rate is kept in the optimizer's groups, which `load_optimizer_states=False` leaves as the new engine has them, while
the scheduler is loaded (runtime/engine.py, _load_checkpoint). StepLR, ExponentialLR, CosineAnnealingLR and others of
torch multiply the rate that they find in a group, so that it stays a multiple of what is due.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def engine_of(stage: int) -> deepspeed.DeepSpeedEngine:
    """Return an engine whose rate is halved by each step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=halving, config=config)[0]


def step(engine: deepspeed.DeepSpeedEngine) -> None:
    """Take a step."""
    engine.backward(engine(torch.ones(1, 8, device=engine.device)).sum())
    engine.step()


def times_as_high(stage: int) -> float:
    """Load what three steps have saved without the optimizer's states; return how many times too high the rate is."""
    engine = engine_of(stage)
    for _ in range(3):
        step(engine)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="saved")
        dist.barrier()
        other = engine_of(stage)
        other.load_checkpoint(folders[0], tag="saved", load_optimizer_states=False)
        dist.barrier()  # the first rank removes the folder
    for one in (engine, other):
        step(one)
    return float(other.get_lr()[0] / engine.get_lr()[0])


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(times_as_high, stage) for stage in range(4)},
        said=lambda found: f"a step behind the load the rate is {found:g} times what is due; 1 is right",
        right=lambda found: found == 1,
        fault=lambda found: found == 8,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
