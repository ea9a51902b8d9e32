"""Whether torch compiles DeepSpeed's operators just now, seen from outside.

While one is compiled a file named `lock` lies beside it, for which all others wait without a word, also where who made it
was killed and nobody will ever remove it (torch/utils/file_baton.py, read in 2.13.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compilation:
    """A lock that lies there.

    Attributes:
        lock: the file.
        begun: when it was made, in seconds since the epoch.
    """

    lock: Path
    begun: float

    @property
    def operator(self) -> str:
        """What is compiled: DeepSpeed's name of it."""
        return self.lock.parent.name

    def older_than(self, moment: float) -> bool:
        """Whether it had begun before, so that ranks started at that moment may wait for one that was killed."""
        return self.begun < moment

    def told(self, started: float) -> str:
        """Return a sentence about it for those who wait for ranks that were started then."""
        if self.older_than(started):
            return (
                f"the ranks may wait for a compilation of {self.operator} that began before them: if no compiler runs, it "
                f"was killed; delete {self.lock}"
            )
        return f"torch compiles DeepSpeed's {self.operator}, once a machine"


def compilation(environment: Mapping[str, str]) -> Compilation | None:
    """Return the oldest lock in the folders that processes with this environment compile in, None where there is none."""
    found = []
    for lock in _folders(environment):
        with suppress(FileNotFoundError):  # it has just ended
            found.append(Compilation(lock, lock.stat().st_mtime))
    return min(found, key=lambda one: one.begun, default=None)


def _folders(environment: Mapping[str, str]) -> list[Path]:
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return list(Path(chosen).glob("*/lock"))
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return list(Path(cache, "torch_extensions").glob("*/*/lock"))
