"""`latest` names a checkpoint whose files are not all written: a run that is killed then can't be resumed.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/latest_before_all_files.py

save_checkpoint lets the first rank write `latest` when it has its own files, before the barrier that waits for those of
the others; and empties the `latest` of before first (runtime/engine.py). Here the last rank is slow with its file.
"""

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def named_too_early(folder: Path) -> bool:
    """Save; return whether `latest` names the checkpoint before the last rank has begun to write its file."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1.0, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    model = torch.nn.Linear(4, 1)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    save, early = engine.checkpoint_engine.save, []

    def late(state_dict: Any, path: str) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(1)
            early.append((folder / "latest").exists())
        save(state_dict, path)

    engine.checkpoint_engine.save = late
    engine.save_checkpoint(str(folder), tag="slow")
    engine.destroy()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, early)
    return any(gathered[-1])


def main() -> dict[str, str]:
    """Save on ZeRO 1, with a last rank that is slow."""
    folder = (
        f"{tempfile.gettempdir()}/latest_before_all_files_{os.environ.get('MASTER_PORT')}"  # the same on every rank
    )
    return tell(
        {"ZeRO 1": partial(named_too_early, Path(folder))},
        said=lambda early: f"latest named a checkpoint before all of it was written: {early}",
        right=lambda early: not early,
        fault=lambda early: early,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
