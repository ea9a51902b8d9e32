"""What is run for the page on transformers' Trainer: three ways to divide, as they are and normalised."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tools.migrations.common import Found, compared, configuration
from tools.migrations.trainer import after, before
from tools.migrations.trainer.task import KINDS


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    config = configuration(before.CONFIG, 2, probe=False)  # the trainer is asked for SGD by its own arguments
    result: Found = {"probed": {}, "trained": {}}
    for kind in KINDS:
        for when, loop in (("before", before), ("after", after)):
            name = f"{kind}, {when}"
            result["probed"][name] = loop.train(config, kind, probe=True)
            result["trained"][name] = loop.train(config, kind, trace=folder / f"{name}.jsonl")
    dist.barrier()  # the first rank writes the traces
    right = folder / "right, before.jsonl"
    result["compared"] = {
        name: compared(right, folder / f"{name}.jsonl") for name in result["trained"] if name != "right, before"
    }
    return result
