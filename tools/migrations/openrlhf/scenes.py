"""What is run for the page on OpenRLHF: dynamic and fixed batches, before and after, probed and trained."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from tools.migrations.common import Found, Watch, compared, configuration
from tools.migrations.openrlhf import after, before

SCENES = (("dynamic", 1), ("dynamic", 2), ("dynamic", 3), ("fixed", 2))
MODELS = ("actor", "critic")


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    result: Found = {"probed": {}, "trained": {}, "same_weights": {}, "compared": {}}
    for kind, stage in SCENES:
        scene, runs = f"{kind}, ZeRO {stage}", {}
        for when, loop in (("before", before), ("after", after)):
            probed = _run(loop, stage, kind, None, probe=True)
            result["probed"][f"{scene}, {when}"] = {name: watch.steps for name, watch in probed.items()}
            runs[when] = _run(loop, stage, kind, folder / f"{kind}{stage}{when}.jsonl")
            result["trained"][f"{scene}, {when}"] = {name: watch.steps for name, watch in runs[when].items()}
            result["trained"][f"{scene}, {when}"]["left"] = runs[when]["actor"].pending
        result["same_weights"][scene] = {
            name: runs["before"][name].weights == runs["after"][name].weights for name in MODELS
        }
        dist.barrier()  # the first rank writes the traces
        result["compared"][scene] = {
            name: compared(folder / f"{kind}{stage}after.{name}.jsonl", folder / f"{kind}{stage}before.{name}.jsonl")
            for name in MODELS
        }
    return result


def _run(loop: ModuleType, stage: int, kind: str, trace: Path | None, probe: bool = False) -> dict[str, Watch]:
    config = configuration(before.CONFIG, stage, probe)
    watches: dict[str, Watch] = loop.train(config, kind == "dynamic", trace, probe)
    for watch in watches.values():
        watch.close()
        watch.engine.destroy()
    return watches
