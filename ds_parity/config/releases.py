"""Releases of DeepSpeed, in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering
from typing import Final

_WRITTEN: Final = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>a|b|c|rc|alpha|beta|pre|preview)[-_.]?(?P<pre_number>\d*))?"
    r"(?:[-_.]?(?P<post>post|rev|r)[-_.]?\d*|-\d+)?"
    r"(?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_number>\d*))?"
    r"(?:\+(?P<build>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?",
    re.IGNORECASE,
)
_EARLY: Final = {"a": 1, "alpha": 1, "b": 2, "beta": 2, "c": 3, "rc": 3, "pre": 3, "preview": 3}
_FINAL: Final = 4


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """One release, read as Python packages are numbered (PEP 440).

    A candidate (0.19.8rc1) and a development version (0.19.8.dev0) come before their release; a build of one's own
    (0.19.8+cu12) and a post release stand for it.

    Attributes:
        numbers: major, minor and patch, without zeros behind.
        early: what comes before the release itself: its kind and number.
        written: as it was given.
        build: the name of a build of one's own, "" where it is none.
    """

    numbers: tuple[int, ...]
    early: tuple[int, int]
    written: str
    build: str = ""

    @property
    def final(self) -> bool:
        """Whether it is a release itself, and neither a candidate nor a development version."""
        return self.early == (_FINAL, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Release) and self._key == other._key

    def __lt__(self, other: Release) -> bool:
        return self._key < other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return self.written

    @property
    def _key(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        return self.numbers, self.early


def read(written: str) -> Release | None:
    """Return the release that a version names, None where it names none (as `nightly` does).

    Args:
        written: a version, as packages and `deepspeed.__version__` write it.
    """
    match = _WRITTEN.fullmatch(written.strip())
    if match is None:
        return None
    numbers = [int(number) for number in match["release"].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return Release(tuple(numbers), _early(match), written.strip(), match["build"] or "")


def release(written: str) -> Release:
    """Return the release that a version names.

    Raises:
        ValueError: it names none.
    """
    found = read(written)
    if found is None:
        raise ValueError(f"{written!r} is not a version: numbers with points between them, as in 0.19.8 or 0.19.8rc1")
    return found


def _early(match: re.Match[str]) -> tuple[int, int]:
    if match["pre"]:
        return _EARLY[match["pre"].lower()], int(match["pre_number"] or 0)
    if match["dev"] and not match["post"]:
        return 0, int(match["dev_number"] or 0)
    return _FINAL, 0
