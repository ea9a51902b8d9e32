"""Whether torch compiles extensions, DeepSpeed's operators among them, while ranks run: seen from outside.

A file named `lock` lies beside an extension while a process compiles or loads it. All other processes wait for it and
say nothing, even if the process that made it was killed and nobody will ever remove it (torch/utils/file_baton.py,
2.13.0). The process that made it keeps it open, so Linux says whose it is: other environments compile into the same
folder, and what they do is no progress of ranks that do not wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ds_parity.parity.running.holders import holders

# Every process that loads an extension holds its lock for a moment, also where there is nothing to compile.
_A_MOMENT = 5.0
_BETWEEN_LOOKS = 1.0


class Lock(NamedTuple):
    """A lock by what stays the same as long as it lies there: its times are never compared with our own clock."""

    path: Path
    inode: int
    changed: int

    @property
    def extension(self) -> str:
        """What is compiled."""
        return self.path.parent.name


class Compilers:
    """Watches compilers that run beside ranks.

    Args:
        environment: of the ranks, which must be started after this.
        waited_for: returns the paths of the locks that ranks have said they wait for.

    Attributes:
        session: of the ranks' processes, once they are started; None: whose a lock is, is not asked.
    """

    def __init__(self, environment: Mapping[str, str], waited_for: Callable[[], Collection[str]] = lambda: ()) -> None:
        self.session: int | None = None
        self._environment = environment
        self._before = set(self._locks())
        self._waited_for = waited_for
        self._since: dict[Lock, float] = {}
        self._held: set[Lock] = set()
        self._strange: set[Lock] = set()
        self._looked = -_BETWEEN_LOOKS

    def look(self, now: float) -> None:
        """Look again, at most once a second.

        Args:
            now: `time.monotonic()`.
        """
        if now - self._looked >= _BETWEEN_LOOKS:
            self._looked = now
            self._since = {lock: self._since.get(lock, now) for lock in self._locks()}
            self._strange = {lock for lock in self._since if lock not in self._before and self._is_strange(lock)}

    @property
    def running(self) -> bool:
        """Whether ranks compile or load something since they were started, or wait for one who does."""
        return bool(self._since.keys() - self._before - self._strange)

    def _is_strange(self, lock: Lock) -> bool:
        """Whether a lock is known to be no affair of the ranks."""
        if self.session is None:
            return False
        sessions = _sessions_that_hold(lock)
        if not sessions:
            # It is another user's or another host's, and nobody can tell; but its process may just have been killed.
            return lock in self._held
        self._held.add(lock)
        return self.session not in sessions and str(lock.path) not in self._waited_for()

    @property
    def aside(self) -> str:
        """What to say of it beside what the ranks do; "" where there is nothing."""
        for lock, since in self._since.items():
            if lock not in self._before | self._strange and self._looked - since >= _A_MOMENT:
                return f"; torch compiles {lock.extension}, once a machine"
        return "".join(f"; {self._may_wait(lock)}" for lock in self._since if lock in self._before)

    @property
    def blame(self) -> str:
        """What to say of it where ranks are ended; "" where there is nothing."""
        return "".join(
            f"; {self._may_wait(lock)}"
            if lock in self._before
            else f"; torch was compiling {lock.extension}, which is ended too: delete {lock.path}, if no other run "
            "compiles it"
            for lock in self._locks()
            if lock not in self._strange
        )

    def _may_wait(self, lock: Lock) -> str:
        return (
            f"ranks that need {lock.extension} wait for a compilation that began before them: if no compiler runs, it "
            f"was killed; delete {lock.path}"
        )

    def _locks(self) -> list[Lock]:
        return locks(self._environment)


def _sessions_that_hold(lock: Lock) -> set[int]:
    """Return the sessions of the processes that have a lock open, as far as Linux lets us see; {} where it does not."""
    sessions = set()
    for process in holders(lock.path):
        with suppress(OSError):  # it has just ended
            sessions.add(os.getsid(process))
    return sessions


def compiles_itself() -> bool:
    """Return whether this process compiles an extension, or loads one: it has a lock open."""
    paths = {str(lock.path.resolve()) for lock in locks(os.environ)}
    for opened in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed since
            if str(opened.readlink()) in paths:
                return True
    return False


def locks(environment: Mapping[str, str]) -> list[Lock]:
    """Return the locks that lie beside extensions now."""
    root, pattern = extensions_folder(environment)
    found = []
    for path in sorted(root.glob(pattern)):
        with suppress(OSError):  # it has just ended, or we may not read it
            status = path.stat()
            found.append(Lock(path, status.st_ino, status.st_mtime_ns))
    return found


def extensions_folder(environment: Mapping[str, str]) -> tuple[Path, str]:
    """Return the folder that this Python's extensions are compiled in, and the pattern of their locks in it.

    The rule is torch's (`_get_build_directory` in torch/utils/cpp_extension.py, `user_cache_dir` in torch/_appdirs.py,
    2.13.0). Torch asks whether a variable is there, not whether it says anything: an empty one makes the path relative
    to the current folder.
    """
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    if chosen is not None:
        return Path(chosen).absolute(), "*/lock"
    cache = environment.get("XDG_CACHE_HOME")
    if cache is None:
        home = environment.get("HOME", os.path.expanduser("~"))  # noqa: PTH111  # Path.home() raises where there is none
        cache = f"{home.rstrip('/')}/.cache"
    version = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(cache, "torch_extensions", f"{version}_{_accelerator()}").absolute(), "*/lock"


def _accelerator() -> str:
    """Return what torch was built for, as it stands in the folder's name."""
    try:
        import torch  # most starts name the folder themselves, and do without
    except Exception:  # `doctor` looks at machines on which torch is missing or broken
        return "cpu"
    for name, release in (("rocm", torch.version.hip), ("cu", torch.version.cuda)):
        if release is not None:
            return f"{name}{release.replace('.', '')}"
    return "cpu"
