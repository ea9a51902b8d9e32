"""How long collectives wait for another rank, where torch lets it be said for the time of a call."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

_LOCK = Lock()
_APPLIED: dict[Any, list[timedelta]] = {}  # what each group's limit was before it was limited, the first one first


class Limit:
    """A limit for what is begun inside `applied`: torch notes it where a collective begins.

    Only groups over gloo are limited. One over NCCL has its own limit, and what becomes of that is another matter: its
    watchdog ends the process where a collective takes longer, so a limit that was changed could end a rank that this
    module would have let raise.

    Args:
        groups: process groups of this rank.
        seconds: each collective may take (> 0).
    """

    def __init__(self, groups: Iterable[Any], seconds: float) -> None:
        self._backends = list({id(one): one for group in groups if (one := _gloo(group)) is not None}.values())
        self._limit = timedelta(seconds=seconds)

    def applied(self) -> _Applied:
        """Return a context that limits the collectives that begin inside, and puts the groups' own limits back."""
        return _Applied(self._backends, self._limit)


class _Applied:
    """One use of a limit. A class and no generator, because each forward and each backward enters one."""

    __slots__ = ("_backends", "_limit")

    def __init__(self, backends: list[Any], limit: timedelta) -> None:
        self._backends = backends
        self._limit = limit

    def __enter__(self) -> None:
        with _LOCK:
            for backend in self._backends:
                # It is read anew each time: whoever owns a group may have changed its limit. Where two engines limit
                # one group at once, in two threads, the first finds what the last puts back.
                _APPLIED.setdefault(backend, []).append(backend.options._timeout)
                backend._set_default_timeout(self._limit)

    def __exit__(self, *_: object) -> None:
        with _LOCK:
            for backend in self._backends:
                found = _APPLIED[backend]
                # Of those that are applied, any may end first.
                backend._set_default_timeout(found.pop() if len(found) > 1 else _APPLIED.pop(backend)[0])


def _gloo(group: Any) -> Any:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group that knows accelerators only
        return None
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it, which has no limit of its own.
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None
