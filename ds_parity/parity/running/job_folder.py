"""The folder of a job: what one before it left is taken away, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from ds_parity.errors import HarnessError

CALLS: Final = "job.json"
LOG: Final = "log.txt"
_CALLED: Final = {"import_from", "calls"}
_OWN: Final = re.compile(rf"{re.escape(CALLS)}|{re.escape(LOG)}|rank[0-9]+\.jsonl")


def written_by(rank: int) -> str:
    """Return the name of the file in which a rank says what it does."""
    return f"rank{rank}.jsonl"


def _is_a_jobs(path: Path) -> bool:
    try:
        calls = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(calls, dict) and calls.keys() >= _CALLED


def emptied(folder: Path) -> Path:
    """Make a job's folder, or take the files of an earlier job out of it: they would be read as this one's.

    Args:
        folder: below a folder that is the user's, who may have one of this name: what a job doesn't write stays there.

    Raises:
        HarnessError: files with the names of a job's lie there, and no job has written them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = sorted(path for path in folder.iterdir() if _OWN.fullmatch(path.name))
    foreign = [path for path in own if not path.is_file()] or ([] if _is_a_jobs(folder / CALLS) else own)
    if foreign:
        raise HarnessError(
            f"{foreign[0]} is there already, and no run of ds-parity has left it: it would be written over. Give "
            "another folder (--out), or move it away"
        )
    # The calls last: without them nobody would know whose the others are.
    for path in sorted(own, key=lambda path: path.name == CALLS):
        path.unlink()
    return folder
