"""Points of a picture and steps of a list, kept in bounded memory however long a trace is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 1600
"""Points of a panel; more would not be seen."""
LISTED = 12
"""Steps of a list that are named."""

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Steps:
    """Some of the steps of a trace.

    Attributes:
        drawn: at most about `MOST` of them, for the marks in a picture.
        first: the first `LISTED` of all.
        count: how many there are.
        digest: of all; equal where the steps are the same.
    """

    drawn: Array
    first: tuple[int, ...]
    count: int
    digest: bytes

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        """Name the first steps, and say how many more there are."""
        named = ", ".join(map(str, self.first))
        return named if self.count == len(self.first) else f"{named} and {self.count - len(self.first)} more"


class Points:
    """Points in the order of their steps, thinned as they come so that the extremes of their last row are kept."""

    def __init__(self, rows: int) -> None:
        self.kept: Array = np.empty((rows, 0))

    def add(self, *rows: Array) -> None:
        """Add points, a row a coordinate."""
        self.kept = np.concatenate([self.kept, np.array(rows, dtype=float)], axis=1)
        if self.kept.shape[1] > 8 * MOST:
            self._thin()

    def taken(self) -> tuple[Array, ...]:
        """Return the points that are kept, a row a coordinate."""
        self._thin()
        return tuple(self.kept)

    def _thin(self) -> None:
        self.kept = self.kept[:, thinned(self.kept[-1])]


class StepList:
    """Steps as they come: all are counted, the first are kept as they are, and of the others some for the picture."""

    def __init__(self) -> None:
        self._points = Points(1)
        self._first: list[int] = []
        self._count = 0
        # Thinned points cannot tell two lists apart that differ between them, and whole lists have no bound.
        self._digest = sha256()

    def add(self, steps: Array) -> None:
        """Add steps, each greater than the one before."""
        self._points.add(steps)
        self._first += [int(step) for step in steps[: LISTED - len(self._first)]]
        self._count += len(steps)
        self._digest.update(steps.astype(np.int64).tobytes())

    def taken(self) -> Steps:
        """Return what is known of the steps."""
        (drawn,) = self._points.taken()
        return Steps(drawn, tuple(self._first), self._count, self._digest.digest())


def thinned(y: Array) -> Array:
    """Return indices of at most about `MOST` points: of each stretch the ends, the extremes and the first break."""
    if len(y) <= MOST:
        return np.arange(len(y))
    stretches = np.array_split(np.arange(len(y)), MOST // 5)
    return np.array(sorted({at for stretch in stretches for at in _extremes(y, stretch)}))


def _extremes(y: Array, stretch: Array) -> Iterator[int]:
    yield from (int(stretch[0]), int(stretch[-1]))
    values = y[stretch]
    broken = np.isnan(values)
    if not broken.all():
        yield from (int(stretch[np.nanargmin(values)]), int(stretch[np.nanargmax(values)]))
    if broken.any():
        yield int(stretch[np.argmax(broken)])
