"""Windows that end where a control says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ds_parity.config import Settings
from ds_parity.parity.running.layouts import Passes
from ds_parity.parity.subjects.oracle import PlannedWindow, windows_of


def cut(passes: Passes, settings: Settings, ends: Iterable[int]) -> list[PlannedWindow]:
    """Return windows that end after these passes, and one for what is left, each divided by what it holds."""
    starts, windows = [0, *(end + 1 for end in ends)], []
    whole = settings.model_copy(update={"gradient_accumulation_passes": 10**9})
    for first, after in zip(starts, [*starts[1:], len(passes)], strict=True):
        if first == after:
            continue
        (window,) = windows_of(passes[first:after], whole, lookahead=True)
        open_end = after == len(passes) and after - 1 not in starts
        windows.append(replace(window, first=first, last=after - 1, expected=window.total, open=open_end))
    return windows
