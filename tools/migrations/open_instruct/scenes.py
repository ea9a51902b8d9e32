"""What is run for the page on open-instruct: slices on ZeRO 2 and 3, and packs before, after and planned."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from ds_parity.parity.comparison.bounds import Tier
from tools.migrations.common import Found, Watch, compared, configuration
from tools.migrations.open_instruct import after, before, planned, task


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    result: Found = {"probed": {}, "trained": {}}
    for stage in (2, 3):
        for when, loop in (("before", before), ("after", after)):
            watch = _run(loop, stage, 2, None, probe=True)
            result["probed"][f"slices, ZeRO {stage}, {when}"] = watch.steps[:1]
    runs = {
        when: _run(loop, 2, 1, folder / f"{when}.jsonl")
        for when, loop in (("before", before), ("after", after), ("planned", planned))
    }
    for when, watch in runs.items():
        result["trained"][when] = watch.steps
    ranks = dist.get_world_size()
    cuts = list(task.cuts(ranks))
    result["cut"] = {"steps": [len(cut.steps) for cut in cuts], "dropped": [cut.dropped for cut in cuts]}
    result["same_weights"] = runs["before"].weights == runs["after"].weights
    dist.barrier()  # the first rank writes the traces
    result["compared"] = {
        "after": compared(folder / "before.jsonl", folder / "after.jsonl", Tier.EXACT),
        "planned": compared(folder / "planned.jsonl", folder / "before.jsonl"),
    }
    return result


def _run(loop: ModuleType, stage: int, sp: int, trace: Path | None, probe: bool = False) -> Watch:
    watch: Watch = loop.train(configuration(loop.CONFIG, stage, probe), sp, trace, probe)
    watch.close()
    watch.engine.destroy()
    return watch
