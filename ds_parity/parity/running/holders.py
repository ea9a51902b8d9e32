"""Which processes of this machine have a file open, as far as Linux lets us see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROCESSES = Path("/proc")


def holders(path: Path) -> Iterator[int]:
    """Yield the numbers of the processes that have a file open; none where there is no /proc, or no file.

    Processes end while they are looked at, and those of other users may not be: they are left out.

    Args:
        path: of the file; it may lie behind a symbolic link.
    """
    with suppress(OSError):
        wanted = path.stat()
        for entry in _PROCESSES.iterdir():
            if entry.name.isdecimal() and any(os.path.samestat(wanted, opened) for opened in _opened(entry)):
                yield int(entry.name)


def _opened(process: Path) -> Iterator[os.stat_result]:
    # Not by glob(): that raises where a process ends between two of its looks.
    with suppress(OSError), os.scandir(process / "fd") as found:
        for opened in found:
            with suppress(OSError):
                yield opened.stat()
