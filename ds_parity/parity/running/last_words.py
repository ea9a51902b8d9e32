"""What the log of ranks that ended says of the reason, without the launcher's own lines."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_LAUNCHERS = re.compile(
    r"\] \[(?:INFO|ERROR|WARNING)\] \[(?:launch|runner)\.py:|^DeepSpeed \S+ built successfully$", re.MULTILINE
)
_RAISED = re.compile(r"^(?:\[rank\d+\]:\s*)?[\w.]*(?:Error|Exception|Interrupt)\b")
_NO_COMPILER = re.compile(
    r"\b(?:c\+\+|g\+\+|\S*-gcc|\S*-g\+\+|ninja): (?:command )?not found|Ninja is required to load"
)
# A log of ranks that were killed at their start has a few kB.
_NEARLY_NOTHING = 64_000


def last_words(log: Path) -> str:
    """Return why ranks ended, as far as their log tells: one line.

    Args:
        log: the output of the launcher and its ranks.
    """
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _LAUNCHERS.search(line)]
    if _NO_COMPILER.search(text):
        return (
            "there is no C++ compiler or no ninja, and DeepSpeed compiles its operators when they are first used; "
            "install g++ and ninja, and see `ds-parity doctor`"
        )
    if shutil.disk_usage(log.parent).free < _NEARLY_NOTHING:
        return f"no space is left on the disk of {log.parent}: free some, or choose another folder with --out"
    raised = [line for line in lines if _RAISED.match(line)]
    if raised:
        return raised[-1][:400]
    return " | ".join(line[:200] for line in lines[-3:]) or "nothing (ds-parity doctor looks at this machine)"
