"""Which of DeepSpeed's faults were measured on which version, as tools/fault_table.py keeps it beside this module."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ds_parity.parity.doctor.reading import Reading

PATH = Path(__file__).with_name("measured.json")
FAULT, RIGHT = "fault", "right"
# What the name of a place says of a configuration beside its stage.
_SAID: tuple[tuple[str, Callable[[Reading], bool]], ...] = (
    ("CPU offload", lambda c: c.offloads),
    ("overlap_comm", lambda c: c.overlaps),
    ("round_robin_gradients", lambda c: c.on("zero_optimization.round_robin_gradients")),
    ("fp32 accumulation", lambda c: c.sums_in_fp32),
    ("in fp16", lambda c: c.fp16),
    ("in bf16", lambda c: c.bf16),
)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version; a build's suffix counts as the release that it belongs to."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0]))


def plain_version(version: str) -> str:
    """Return a version without a build's own suffix (0.19.8+abc, 0.19.8rc1): the release that it belongs to."""
    return ".".join(map(str, numbers(version)))


def torch_of(version: str) -> str:
    """Return the release of torch that a version was measured with."""
    return plain_version(_kept()["torch"][version])


def measured() -> dict[str, dict[str, dict[str, str]]]:
    """Return by version, script and place: `right`, `fault`, or why it is neither."""
    versions: dict[str, dict[str, dict[str, str]]] = _kept()["versions"]
    return versions


@cache
def _kept() -> dict[str, Any]:
    everything: dict[str, Any] = json.loads(PATH.read_text())
    return everything


def of_places(places: Mapping[str, str], reading: Reading) -> list[str]:
    """Return what came out where a configuration is.

    A place that says more than the configuration is left out, and one that says less only where another says more.
    """
    chosen = [place for place in places if re.match(rf"ZeRO {reading.stage}\b", place)]
    for said, asked in _SAID:
        having = [place for place in chosen if said in place]
        wanted = having if asked(reading) else [place for place in chosen if said not in place]
        chosen = wanted or chosen
    return [places[place] for place in chosen or places]
