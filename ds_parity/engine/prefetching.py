"""Micro-batches made in a thread, while the pass before them runs."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from deepspeed.accelerator import get_accelerator

_LOG = logging.getLogger("ds_parity")
_END: Final = object()
_PATIENCE: Final = 60.0  # seconds in which a stream must yield what it makes when its reader leaves


_here = threading.local()


def is_reading() -> bool:
    """Return whether this is a thread that reads a stream ahead."""
    return getattr(_here, "reads", False)


class _Raised:
    """What a stream has raised in place of its next micro-batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Prefetched(Iterator[Any]):
    """Reads a stream in a thread, up to some micro-batches ahead of who takes them.

    What the stream raises is raised where its micro-batch would have been taken. The thread ends with the stream, or
    with `close`; until somebody takes the first micro-batch there is none. The stream itself is not closed: another
    reader may go on with it.

    Args:
        stream: read by the thread alone from now on; what it queues on an accelerator is queued on the stream that is
            current here, in front of what is queued after a micro-batch was taken.
        ahead: micro-batches that may wait to be taken (>= 1).
    """

    def __init__(self, stream: Iterator[Any], ahead: int) -> None:
        self._stream = stream
        self._ahead = ahead
        self._made: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def __next__(self) -> Any:
        if self._thread is None and not self._closed:
            accelerator = get_accelerator()
            where = accelerator.current_device(), accelerator.current_stream()
            self._thread = threading.Thread(target=self._run, args=where, name="ds_parity prefetch", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._made or self._closed)
            made = self._made.popleft() if self._made else _END
            if made is _END or isinstance(made, _Raised):
                self._closed = True
            self._changed.notify_all()
        if isinstance(made, _Raised):
            raise made.error
        if made is _END:
            raise StopIteration
        return made

    def waiting(self, most: int) -> list[Any] | None:
        """Return the micro-batches that `next` gives without waiting, and take none.

        Args:
            most: how many at most (>= 1).

        Returns:
            As many; fewer where the stream ends behind them; None where there are not so many yet, or the stream has
            raised in place of one.
        """
        with self._changed:
            made = list(self._made)[:most]
        ends = bool(made) and made[-1] is _END
        if any(isinstance(one, _Raised) for one in made) or not (ends or len(made) == most):
            return None
        return made[:-1] if ends else made

    def close(self) -> None:
        """End the thread, and let go of what nobody has taken; waits until the stream has yielded what it makes."""
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                _LOG.warning(
                    "the stream of passes(prefetch=%d) has not yielded for %d seconds after its loop was left: its "
                    "thread goes on until it does; let the stream end where its data does",
                    *(self._ahead, _PATIENCE),
                )
            self._made.clear()

    def _run(self, device: Any, queue: Any) -> None:
        _here.reads = True
        # Both are each thread's own.
        accelerator = get_accelerator()
        accelerator.set_device(device)
        with accelerator.stream(queue):
            while self._put(self._next()):
                pass

    def _next(self) -> Any:
        try:
            return next(self._stream, _END)
        except BaseException as error:  # raised where the micro-batch would be taken
            return _Raised(error)

    def _put(self, made: Any) -> bool:
        """Hand over what was made; return whether more is wanted, once there is room for it."""
        with self._changed:
            if not self._closed:
                self._made.append(made)
                self._changed.notify_all()
            if made is _END or isinstance(made, _Raised):
                return False
            self._changed.wait_for(lambda: self._closed or len(self._made) < self._ahead)
            return not self._closed
