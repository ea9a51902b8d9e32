"""What is run for the page on ROLL: its steps and schedule, and those by rollouts."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tools.migrations.common import Found, compared, configuration
from tools.migrations.roll import after, before


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    result: Found = {"trained": {}}
    for when, loop in (("before", before), ("after", after)):
        watch = loop.train(configuration(loop.CONFIG, 2, probe=False), folder / f"{when}.jsonl")
        result["trained"][when] = watch.close()
        watch.engine.destroy()
    dist.barrier()  # the first rank writes the traces
    result["compared"] = {"before": compared(folder / "after.jsonl", folder / "before.jsonl")}
    return result
