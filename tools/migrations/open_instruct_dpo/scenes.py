"""What is run for the page on open-instruct's DPO: three rules of what a micro-batch weighs, and the pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tools.migrations.common import Found, Watch, compared, configuration
from tools.migrations.open_instruct_dpo import after, before
from tools.migrations.open_instruct_dpo.task import RULES


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    result: Found = {"probed": {}, "trained": {}}
    loops: list[tuple[str, Any, Found]] = [(rule, before, {"rule": rule}) for rule in RULES]
    for name, loop, more in [*loops, ("after", after, {})]:
        result["probed"][name] = _run(loop, None, probe=True, **more).steps
        result["trained"][name] = _run(loop, folder / f"{name}.jsonl", **more).steps
    dist.barrier()  # the first rank writes the traces
    result["compared"] = {rule: compared(folder / "after.jsonl", folder / f"{rule}.jsonl") for rule in RULES}
    return result


def _run(loop: Any, trace: Path | None, probe: bool = False, **more: Any) -> Watch:
    watch: Watch = loop.train(configuration(loop.CONFIG, 2, probe), trace=trace, probe=probe, **more)
    watch.close()
    watch.engine.destroy()
    return watch
