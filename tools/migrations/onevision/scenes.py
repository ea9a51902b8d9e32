"""What is run for the page on OneVision-Encoder: its loop in three states, and ds_parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_parity.parity.comparison.bounds import Tier
from tools.migrations.common import Found, Watch, compared, configuration
from tools.migrations.onevision import after, before


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    loops: list[tuple[str, Any, Found]] = [(state, before, {"state": state}) for state in before.STATES]
    runs = {name: _run(loop, folder / f"{name}.jsonl", **more) for name, loop, more in [*loops, ("after", after, {})]}
    result: Found = {"trained": {name: watch.steps for name, watch in runs.items()}}
    result["left"] = {name: watch.pending for name, watch in runs.items()}
    result["same_weights"] = {"merged": runs["merged"].weights == runs["after"].weights}
    result["probed"] = {
        "before": _run(before, None, probe=True, state="before").steps[:2],
        "after": _run(after, None, probe=True).steps[:2],
    }
    dist.barrier()  # the first rank writes the traces
    tiers = {"before": Tier.REASSOCIATED, "half": Tier.REASSOCIATED, "merged": Tier.EXACT}
    result["compared"] = {
        name: compared(folder / "after.jsonl", folder / f"{name}.jsonl", tier) for name, tier in tiers.items()
    }
    return result


def _run(loop: Any, trace: Path | None, probe: bool = False, **more: Any) -> Watch:
    watch: Watch = loop.train(configuration(loop.CONFIG, 2, probe), trace=trace, probe=probe, **more)
    watch.close()
    watch.engine.destroy()
    return watch
