"""How much memory a window takes, on a CPU, where no allocator keeps count."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn


class Peaks:
    """Watches allocations in up to three windows after the first, what writes a step down left out.

    The profiler sees this thread only: memory that a thread of a collective frees seems to stay, so a figure can be too
    great by chance, and never too small.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.parameters = 0
        self._profile: Any = None

    def before(self, module: nn.Module) -> None:
        """End a window."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.bytes.append(greatest(self._profile))
            self._profile = None

    def after(self, module: nn.Module) -> None:
        """Begin one."""
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
        if len(self.bytes) < 3:
            gc.collect()
            self._profile = torch.profiler.profile(profile_memory=True)
            self._profile.__enter__()

    def end(self) -> None:
        """Throw away a window that was begun and not ended by a step."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)


def greatest(profile: Any) -> int:
    """Return the bytes that were held at most above the start of a profile that was taken with `profile_memory`."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
