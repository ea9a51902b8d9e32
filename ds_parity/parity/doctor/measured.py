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
# What the name of a place says of a configuration beside its stage, and the precision that it is in.
_SAID: tuple[tuple[str, Callable[[Reading], bool]], ...] = (
    ("CPU offload", lambda c: c.offloads),
    ("overlap_comm", lambda c: c.overlaps),
    ("round_robin_gradients", lambda c: c.on("zero_optimization.round_robin_gradients")),
)
_SUMS, _FP16, _BF16 = "fp32 accumulation", "in fp16", "in bf16"


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version; a build's suffix counts as the release that it belongs to."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0]))


def plain_version(version: str) -> str:
    """Return a version without a build's own suffix (0.19.8+abc, 0.19.8rc1): the release that it belongs to."""
    return ".".join(map(str, numbers(version)))


def measured() -> dict[str, dict[str, dict[str, str]]]:
    """Return by version, script and place: `right`, `fault`, or why it is neither."""
    versions: dict[str, dict[str, dict[str, str]]] = _kept()["versions"]
    return versions


@cache
def _kept() -> dict[str, Any]:
    everything: dict[str, Any] = json.loads(PATH.read_text())
    return everything


def of_places(places: Mapping[str, str], reading: Reading) -> list[str] | None:
    """Return what came out where a configuration is; None where its script has no such place.

    A script that says nothing of CPU offload (or overlap_comm, or the precision) in any of its places is taken to hold
    with it and without. One that does say something of it is only believed where it was tried.
    """
    where = {place: _where(place) for place in places}
    told = frozenset().union(*where.values())
    asked = {said for said, wanted in _SAID if wanted(reading)} & told
    precision = _precision(reading)
    # A script that names bf16 together with fp32 accumulation alone says nothing of plain bf16.
    if precision in told or told & {_FP16, _BF16}:
        asked |= {precision} - {""}
    chosen = [
        outcome
        for place, outcome in places.items()
        if re.match(rf"ZeRO {reading.stage}\b", place) and where[place] == asked
    ]
    return chosen or None


def _where(place: str) -> frozenset[str]:
    found = {said for said, _ in _SAID if said in place}
    return frozenset(found | {next((said for said in (_SUMS, _FP16, _BF16) if said in place), "")} - {""})


def _precision(reading: Reading) -> str:
    if reading.sums_in_fp32:
        return _SUMS
    return _FP16 if reading.fp16 else _BF16 if reading.bf16 else ""
