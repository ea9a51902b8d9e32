"""Line 1 of a trace that is written on this machine."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

from ds_parity.trace.records import Header


def header(
    scenario: str, config: dict[str, Any], *, engine: str, ranks: int, device: str, seed: int | None = None
) -> Header:
    """Return the header, with the versions that are installed here.

    Args:
        scenario: what is run.
        config: the configuration; the header keeps its SHA-256, over JSON with sorted keys.
        engine: which engine writes the trace.
        ranks: data-parallel ranks (>= 1).
        device: what the ranks run on and talk by, such as `cuda nccl`. It is given, since only DeepSpeed's accelerator
            knows it, and traces know neither DeepSpeed nor torch.
        seed: of the run, None where it has none.

    Raises:
        PackageNotFoundError: ds_parity, deepspeed or torch is not installed.
    """
    canonical = json.dumps(config, sort_keys=True, default=str).encode()
    return Header(
        scenario=scenario,
        seed=seed,
        versions={name: version(name) for name in ("ds_parity", "deepspeed", "torch")},
        device=device,
        ranks=ranks,
        config_hash=hashlib.sha256(canonical).hexdigest(),
        engine=engine,
    )
