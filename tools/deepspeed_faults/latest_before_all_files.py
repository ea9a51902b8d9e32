"""`latest` names a checkpoint whose files are not all written: a run that is killed then can't be resumed.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/latest_before_all_files.py

save_checkpoint lets the first rank write `latest` when it has its own files, before the barrier that waits for those of
the others; and empties the `latest` of before first (runtime/engine.py). Here the last rank is slow with its file.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist


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


def main() -> bool:
    """Return whether the fault is there."""
    folder = (
        f"{tempfile.gettempdir()}/latest_before_all_files_{os.environ.get('MASTER_PORT')}"  # the same on every rank
    )
    fault = named_too_early(Path(folder))
    print(f"latest named a checkpoint before all of it was written: {fault}")
    print("FAULT" if fault else "fixed in this version")
    return fault


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
