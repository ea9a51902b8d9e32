"""How much memory a window takes: as the accelerator's allocator counts it, or on a CPU as torch's profiler sees it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn


class Peaks:
    """Watches allocations in up to two windows after the first, what writes a step down left out.

    On a CPU the profiler sees this thread only: memory that a thread of a collective frees seems to stay, so a figure can
    be too great by chance, and never too small.

    Attributes:
        bytes: for each window, what it held at most above what was held at its start.
        parameters: how many numbers the model holds.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.parameters = 0
        self._watch: _Profiled | _Allocated | None = None

    def before(self, module: nn.Module) -> None:
        """End a window."""
        if self._watch is not None:
            self.bytes.append(self._watch.end())
            self._watch = None

    def after(self, module: nn.Module) -> None:
        """Begin one."""
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
        if len(self.bytes) < 2:
            gc.collect()
            self._watch = _Profiled() if get_accelerator().device_name() == "cpu" else _Allocated()

    def end(self) -> None:
        """Throw away a window that was begun and not ended by a step."""
        if self._watch is not None:
            self._watch.end()


class _Allocated:
    def __init__(self) -> None:
        self._accelerator = get_accelerator()
        self._accelerator.reset_peak_memory_stats()
        self._start = int(self._accelerator.memory_allocated())

    def end(self) -> int:
        return int(self._accelerator.max_memory_allocated()) - self._start


class _Profiled:
    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> int:
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return greatest(self._profile)


def greatest(profile: Any) -> int:
    """Return the bytes that were held at most above the start of a profile that was taken with `profile_memory`."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
