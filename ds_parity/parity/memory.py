"""How much memory a window takes: as the accelerator's allocator counts it, or on a CPU as torch's profiler sees it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

# What the profiler calls a node of the graph as backward runs it.
_BACKWARD = "autograd::engine::evaluate_function"


class Peaks:
    """Watches allocations in up to two windows after the first, what writes a step down left out.

    On a CPU: what is held from the end of a window's last backward on, where gradients are reduced and stepped. Before that
    a small model's activations hide its gradients: a second copy of them was not to be seen in the peak of the whole window.
    On a CPU the profiler sees this thread only: memory that a thread of a collective frees seems to stay, so a figure can
    be too great by chance, and never too small.

    Attributes:
        bytes: for each window, what it held at most (on a CPU: after its last backward) above what was held at its start.
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
        return greatest(self._profile, after_backward=True)


def greatest(profile: Any, *, after_backward: bool = False) -> int:
    """Return the bytes that were held at most above the start of a profile that was taken with `profile_memory`.

    Args:
        profile: a `torch.profiler.profile` that has ended.
        after_backward: from the end of the last backward on.
    """
    events = profile.profiler.kineto_results.events()
    ends = [e.start_ns() + e.duration_ns() for e in events if e.name().startswith(_BACKWARD)] if after_backward else []
    begin, held, peak = max(ends, default=0), 0, None
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        if event.start_ns() >= begin:
            peak = held if peak is None else max(peak, held)
    return held if peak is None else max(peak, 0)
