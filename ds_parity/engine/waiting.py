"""Says why an engine takes long to build: torch waits in silence for a lock, also for one of a compile that was killed.

torch/utils/file_baton.py, 2.13.0: the file `lock` lies beside an operator while a process compiles it, and all other
processes wait until it is gone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

_LOG = logging.getLogger("ds_parity")
_PATIENCE = 15.0
"""Seconds. Every process that loads an operator holds its lock for a moment, and small engines take a second."""


@contextmanager
def saying_what_is_waited_for(patience: float = _PATIENCE) -> Iterator[None]:
    """Warn once, on the first rank of each host, of locks that lay there before and still do after a while.

    Args:
        patience: seconds until then.
    """
    before = _locks() if os.environ.get("LOCAL_RANK", "0") == "0" else {}
    if not before:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(before, done, patience), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(before: dict[Path, int], done: threading.Event, patience: float) -> None:
    if done.wait(patience):
        return
    now = _locks()
    for path, inode in before.items():
        if now.get(path) == inode:
            _LOG.warning(
                "the engine is not built after %g s, and %s has been there since before: if DeepSpeed needs %s, it "
                "waits for the process that compiles it (about 90 s); if no compiler runs, that process was killed: "
                "delete the file (`ds-parity doctor` says whose it is)",
                patience,
                path,
                path.parent.name,
            )


def _locks() -> dict[Path, int]:
    """Return the locks beside this environment's operators, each with the inode that tells it from a later one."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(get_default_build_root() if chosen is None else chosen)
    found = {}
    for path in root.glob("*/*/lock" if chosen is None else "*/lock"):
        with suppress(OSError):  # it has just gone
            found[path] = path.stat().st_ino
    return found
