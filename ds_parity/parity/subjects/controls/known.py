"""The controls, gathered from their files."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from ds_parity.parity.subjects import controls
from ds_parity.parity.subjects.controls.loop import Loop

# Faults that leave no trace to compare: ranks hang or raise, and what says so.
WITHOUT_TRACE = {
    "idle-detached": "ZeRO 3 hangs in the backward, which waits for a parameter's gradient that never comes; the "
    "harness ends it when the time is up",
    "pass-count-differs": "ZeRO 2 and 3 abort or hang; `engine.backward` raises RankDesyncError on every rank",
    "short-padding": "a rank is short of a pass: as pass-count-differs",
    "late-boundary on ZeRO 1 and 2": "DeepSpeed raises a KeyError in step()",
}


@cache
def known() -> dict[str, type[Loop]]:
    """Return every control by its name, in the order of rooms and names."""
    controls_by_name: dict[str, type[Loop]] = {}
    for module in pkgutil.walk_packages(controls.__path__, f"{controls.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Loop) and value.__module__ == module.name and value.name:
                controls_by_name[value.name] = value
    return controls_by_name
