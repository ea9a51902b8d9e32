"""Line 1 of a trace that is written on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from ds_parity.trace.records import Header, Start
from ds_parity.values import switch, whole

_BY_NAME = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}


def header(
    scenario: str,
    config: dict[str, Any],
    *,
    engine: str,
    ranks: int,
    device: str,
    seed: int | None = None,
    start: Start | None = None,
) -> Header:
    """Return the header, with the versions that are installed here.

    Args:
        scenario: what is run.
        config: the configuration; the header keeps its SHA-256, over JSON with sorted keys. Where the trace is written
            to (`ds_parity.trace`) is left out: two runs that differ in it alone are the same run.
        engine: which engine writes the trace.
        ranks: data-parallel ranks (>= 1).
        device: what the ranks run on and talk by, such as `cuda nccl`. It is given, since only DeepSpeed's accelerator
            knows it, and traces know neither DeepSpeed nor torch.
        seed: of the run, None where it has none.
        start: the weights before the first step, None where they are not known.

    Raises:
        PackageNotFoundError: ds_parity, deepspeed or torch is not installed.
    """
    canonical = json.dumps(_without_path(config), sort_keys=True, default=str).encode()
    return Header(
        scenario=scenario,
        seed=seed,
        versions={name: version(name) for name in ("ds_parity", "deepspeed", "torch")},
        device=device,
        ranks=ranks,
        config_hash=hashlib.sha256(canonical).hexdigest(),
        engine=engine,
        dtype=dtype_of(config),
        stage=_stage(config),
        optimizer=_optimizer(config),
        start=start,
    )


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return what a DeepSpeed configuration computes in: `fp32`, `bf16` or `fp16`; None where it can't be told."""
    autocast = config.get("torch_autocast")
    if isinstance(autocast, Mapping) and switch("torch_autocast.enabled", autocast.get("enabled")):
        return _BY_NAME.get(str(autocast.get("dtype", "bfloat16")).removeprefix("torch."))
    # DeepSpeed reads the old name where the new one is missing or null.
    bf16 = "bfloat16" if config.get("bf16") is None else "bf16"
    sections = {name: section for name in (bf16, "fp16") if isinstance(section := config.get(name), Mapping)}
    switched = {name: switch(f"{name}.enabled", it.get("enabled", False)) for name, it in sections.items()}
    if None in switched.values():
        return None  # "auto": a framework decides
    return next((_BY_NAME[name] for name, on in switched.items() if on), "fp32")


def _stage(config: Mapping[str, Any]) -> int | None:
    section = config.get("zero_optimization") or {}
    if isinstance(section, bool):  # DeepSpeed's old way to write stages 1 and 0
        return int(section)
    return whole(section.get("stage", 0)) if isinstance(section, Mapping) else None  # "auto": a framework decides


def _optimizer(config: Mapping[str, Any]) -> str | None:
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    return kind if isinstance(kind, str) else None


def _without_path(config: dict[str, Any]) -> dict[str, Any]:
    section = config.get("ds_parity")
    if not isinstance(section, Mapping) or "trace" not in section:
        return config
    kept = {key: value for key, value in section.items() if key != "trace"}
    return {**config, "ds_parity": kept}
