"""What is run for the page on Fast-LLM: its rule and ours over one stream, and its log beside a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_parity.parity.comparison.bounds import Tier
from tools.migrations.common import Found, Watch, compared, configuration
from tools.migrations.fast_llm import after, before

LOSSES = ("documents", "labels")
MAPS = ("loss=training.grpo", "rollouts=training.num_documents")


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    result: Found = {"probed": {}, "trained": {}, "same_weights": {}, "compared": {}}
    for loss in LOSSES:
        runs = {
            f"{loss}, before": _run(before, loss, folder / f"{loss}.before.jsonl", log=folder / f"{loss}.log.jsonl"),
            f"{loss}, same": _run(after, loss, folder / f"{loss}.same.jsonl", same=True),
            f"{loss}, after": _run(after, loss, folder / f"{loss}.after.jsonl"),
        }
        result["trained"] |= {name: watch.steps for name, watch in runs.items()}
        result["same_weights"][loss] = runs[f"{loss}, before"].weights == runs[f"{loss}, same"].weights
        for when, loop in (("before", before), ("after", after)):
            result["probed"][f"{loss}, {when}"] = _run(loop, loss, None, probe=True).steps[:4]
        dist.barrier()  # the first rank writes the traces
        own = folder / f"{loss}.same.jsonl"
        result["compared"][f"{loss}, trace"] = compared(folder / f"{loss}.before.jsonl", own, Tier.EXACT)
        result["compared"][f"{loss}, log"] = compared(own, folder / f"{loss}.log.jsonl", maps=MAPS)
    return result


def _run(loop: Any, loss: str, trace: Path | None, probe: bool = False, **more: Any) -> Watch:
    watch: Watch = loop.train(configuration(loop.CONFIG, 2, probe), loss, trace, probe, **more)
    watch.close()
    watch.engine.destroy()
    return watch
