"""How much memory a step takes: the bytes of every tensor that is born in a window, until it is gone, on any device."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Seconds. The thread of a collective frees its tensors a moment after the collective has returned.
_PATIENCE = 0.002


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are born under it; enter it as a context.

    Dispatch is watched, not the allocator: torch's profiler, which sees a CPU's allocations, doesn't see what other
    threads free, and took what gloo's threads free for kept (in one window out of five).

    Attributes:
        now: bytes that live.
        peak: the most that lived at a time since the start, or since it was set.
        patience: seconds that a new peak is given to go away again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.patience = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; what it returns and wasn't given is new."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = set(map(_address, _tensors((args, kwargs))))
        for tensor in _tensors(result):
            if _address(tensor) not in known:
                known.add(_address(tensor))
                self._born(tensor.untyped_storage())
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.now += size
        weakref.finalize(storage, self._gone, size)
        # What another thread is about to free is not counted as kept, so a new peak is looked at once more.
        if self.now > self.peak and self.patience:
            time.sleep(self.patience)
        self.peak = max(self.peak, self.now)

    def _gone(self, size: int) -> None:
        self.now -= size


class Peaks:
    """Watches up to two windows after the first, without what writes a step down.

    Each window is watched from its last backward on, where gradients are corrected and stepped: before, activations and
    DeepSpeed's buckets would hide a copy of them. Where step() reduces (`ds_parity.boundary: caller`), from there on.

    Attributes:
        bytes: for each window, the most that lived after its last backward or reduction, above what lived at its start.
        parameters: how many numbers of the model are trained.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.parameters = 0
        self._live: LiveBytes | None = None
        engine = DeepSpeedEngine
        self._unwatched = (engine.forward, engine.backward, engine.allreduce_gradients)

    def before(self, module: nn.Module) -> None:
        """End a window."""
        if self._live is not None:
            self.bytes.append(self._live.peak)
        self.end()

    def after(self, module: nn.Module) -> None:
        """Begin one."""
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters() if p.requires_grad)
        if len(self.bytes) < 2:
            # Garbage of the window before would be freed in this one and hide what it allocates.
            gc.collect()
            self._live = LiveBytes()
            self._live.__enter__()  # type: ignore[no-untyped-call]
            self._watch(self._live)

    def end(self) -> None:
        """Stop watching; a window that no step has ended is not counted."""
        if self._live is not None:
            engine = DeepSpeedEngine
            engine.forward, engine.backward, engine.allreduce_gradients = self._unwatched
            self._live.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._live = None

    def _watch(self, live: LiveBytes) -> None:
        forward, *others = self._unwatched

        def entering(engine: Any, *args: Any, **kwargs: Any) -> Any:
            live.patience = 0.0
            return forward(engine, *args, **kwargs)

        def beginning(function: Any) -> Any:
            def returning(engine: Any, *args: Any, **kwargs: Any) -> Any:
                result = function(engine, *args, **kwargs)
                time.sleep(_PATIENCE)
                # The last one of a window wins: each begins the watch anew.
                live.peak, live.patience = live.now, _PATIENCE
                return result

            return returning

        # On the class, because the engine under test looks them up there through its proxy.
        engine = DeepSpeedEngine
        engine.forward = entering
        engine.backward, engine.allreduce_gradients = map(beginning, others)


def _tensors(values: Any) -> Any:
    return (value for value in tree_iter(values) if isinstance(value, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
