"""One command at a time in a folder of traces: another one's would be read as those of this one."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_parity.errors import HarnessError


@contextmanager
def alone_in(folder: Path, what: str) -> Iterator[None]:
    """Keep others of a kind out of a folder, which is made; what a process keeps ends with it, however it ends.

    Args:
        folder: of the traces.
        what: the kind of command, for the lock's name: those of different kinds write different files.

    Raises:
        HarnessError: another process is there.
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{what}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HarnessError(
                f"{folder}: another process runs `{what}` of ds-parity there, and each would read the other's traces; "
                "wait until it has ended, or choose another folder with --out"
            ) from error
        except OSError:  # a file system without locks: as if nobody else were there
            pass
        yield
