"""One run at a time in a folder: a second one would give the first one's groups back, and train on them, too."""

from __future__ import annotations

import fcntl
import os
import socket
from io import TextIOWrapper
from pathlib import Path

import torch.distributed as dist

import ds_parity

_KEPT: list[TextIOWrapper] = []  # until the process ends, however it does


def hold(folder: Path) -> None:
    """Hold a folder as long as the first rank lives; all ranks call it.

    The lock is one of POSIX, which no child of the process inherits. A file system without locks holds nothing.

    Args:
        folder: of the run, which is made.

    Raises:
        ds_parity.ConfigError: another run holds it, or no file can be kept there; raised on all ranks.
    """
    said: list[str | None] = [_why_not(folder / "lock") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said)
    if said[0] is not None:
        raise ds_parity.ConfigError(f"{folder} {said[0]}")


def _why_not(path: Path) -> str | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        return _not_held(path, error)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        by = file.read() or "its first rank says no more"
        return f"is of a run that still trains ({by}): stop it (SIGTERM has it save and end), or give another --output"
    except OSError:
        return None
    _KEPT.append(file)
    try:
        file.truncate(0)
        file.write(f"its first rank is process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except OSError as error:
        return _not_held(path, error)
    return None


def _not_held(path: Path, error: OSError) -> str:
    return f"can't be held for this run: {path.name}: {error.strerror}; give a folder of your own as --output"
