"""What is run for the page on SkyRL: mini-batches by sequences, by prompts, and windows of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_parity.errors import ConfigError
from ds_parity.parity.comparison.bounds import Tier
from tools.migrations.common import Found, Watch, compared, configuration
from tools.migrations.skyrl import after, before


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    runs = {
        "sequences": _run(before, folder / "sequences.jsonl", rule="sequences", batches=2),
        "prompts": _run(before, folder / "prompts.jsonl", rule="prompts", batches=3),
        "after": _run(after, folder / "after.jsonl", batches=3),
        "after, two batches": _run(after, folder / "after2.jsonl", batches=2),
        "few, before": _run(before, folder / "few.before.jsonl", rule="prompts", batches=0),
        "few, after": _run(after, folder / "few.after.jsonl", batches=0),
    }
    result: Found = {"trained": {name: watch.steps for name, watch in runs.items()}}
    result["same_weights"] = {"few": runs["few, before"].weights == runs["few, after"].weights}
    probed = {"prompts": (before, {"rule": "prompts"}), "after": (after, {})}
    result["probed"] = {
        name: _run(loop, None, probe=True, batches=1, **more).steps[:2] for name, (loop, more) in probed.items()
    }
    result["refused"] = {"message": _refused()}
    dist.barrier()  # the first rank writes the traces
    result["compared"] = {
        "prompts": compared(folder / "prompts.jsonl", folder / "after.jsonl"),
        "sequences": compared(folder / "after2.jsonl", folder / "sequences.jsonl"),
        "few": compared(folder / "few.before.jsonl", folder / "few.after.jsonl", Tier.EXACT),
    }
    return result


def _refused() -> str:
    try:
        _run(before, None, rule="sequences", batches=3)
    except ConfigError as error:
        return str(error)
    raise AssertionError("sequences that are no multiple of a mini-batch were not refused")


def _run(loop: Any, trace: Path | None, probe: bool = False, **more: Any) -> Watch:
    watch: Watch = loop.train(configuration(loop.CONFIG, 2, probe), trace=trace, probe=probe, **more)
    watch.close()
    watch.engine.destroy()
    return watch
