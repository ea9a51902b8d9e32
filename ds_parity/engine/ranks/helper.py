"""A thread that goes on with what its owner has begun."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread


class Helper:
    """A thread that does what it is given, one thing after the other, until this object is gone.

    It stays, because whoever starts a thread waits until it runs: on busy cores that was a third of a short pass.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._given.put, None).atexit = False
        Thread(target=_help, args=(self._given,), name="ds_parity sums", daemon=True).start()

    def give(self, work: Callable[[], None]) -> None:
        """Have it do something. What is raised there is for the work itself to tell."""
        self._given.put(work)


def _help(given: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := given.get()) is not None:
        # A thread that ended would leave the next one that gives it work waiting for ever.
        with suppress(BaseException):
            work()
        # Until the next one comes, nothing of this one is kept alive.
        del work
