"""Real loops with one fault each: faults that the diagnosis was not written for.

Each is a class with its `truth`, its `kind` and what a scenario `needs` for it to show; see `base.Fault`.
"""

from __future__ import annotations

from hashlib import sha256
from types import ModuleType

from ds_parity.parity.subjects.controls.loop import Loop
from tests.hard.blind_faults import (
    accumulation,
    advantages,
    clipping,
    data,
    denominators,
    frozen,
    gradient,
    logs,
    loss,
    masking,
    model,
    optimizer,
    precision,
    ranks,
    resume,
    schedule,
    weights,
)
from tests.hard.blind_faults.base import Fault, fitted

__all__ = ["ALL", "Fault", "fitted", "half"]

_AREAS = (
    data,
    masking,
    loss,
    advantages,
    denominators,
    accumulation,
    gradient,
    clipping,
    optimizer,
    schedule,
    weights,
    precision,
    resume,
    logs,
    ranks,
    model,
    frozen,
)


def half(name: str) -> int:
    """Return 0 or 1: the half to which the fault of this name belongs."""
    return sha256(name.encode()).digest()[0] % 2


def _of(area: ModuleType) -> list[type[Fault]]:
    """Return the faults of a module, in the order in which they stand there."""
    return [
        one
        for one in vars(area).values()
        if isinstance(one, type) and issubclass(one, Fault) and one.__module__ == area.__name__ and "name" in vars(one)
    ]


ALL: dict[str, type[Loop]] = {fault.name: fault for area in _AREAS for fault in _of(area)}
"""Every fault by its name, area by area."""
