"""How far training has moved the reference's weights: what a difference of weights is measured by in bf16 and fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_parity.trace import Start
from ds_parity.trace.columns import Array, Columns


@dataclass(frozen=True, slots=True)
class Travelled:
    """The way of the weights up to and including some steps, over their norm there; NaN where it isn't known.

    Attributes:
        path: the lengths of all updates so far, added up; (n,).
        away: the distance from the start, which is never more; (n,).
    """

    path: Array
    away: Array

    @classmethod
    def unknown(cls, steps: int) -> Travelled:
        """Nothing of so many steps."""
        return cls(np.full(steps, np.nan), np.full(steps, np.nan))


class Travel:
    """Follows the weights of one trace from its start, block by block; both lengths are estimates from sketches.

    Args:
        start: where they were before the first step, None where the trace doesn't say. Then the way is unknown, and
            `away` is counted from the first step that has weights: less than it really is.
    """

    def __init__(self, start: Start | None) -> None:
        self._start = self._here = start.sketch if start is not None and start.sketch else None
        self._path = 0.0 if self._start is not None else math.nan

    def along(self, columns: Columns) -> Travelled:
        """Follow the next steps of the trace."""
        lengths = [self._one(it) for it in columns.fields["weights"]]
        return Travelled(*np.array(lengths, dtype=float).reshape(-1, 2).T)

    def _one(self, weights: tuple[str, float, Sequence[float]] | None) -> tuple[float, float]:
        if weights is None:
            return math.nan, math.nan
        _, norm, sketch = weights
        if self._start is None:
            self._start = self._here = sketch or None
        if self._start is None or self._here is None or len(sketch) != len(self._start):
            return math.nan, math.nan
        self._path += _distance(self._here, sketch)
        self._here = sketch
        away = _distance(self._start, sketch)
        if math.isnan(self._path) and not away:
            away = math.nan  # it may have moved before the first step that is known
        return (self._path / norm, away / norm) if 0 < norm < math.inf else (math.nan, math.nan)


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    # math.dist and not numpy: it does not depend on how many steps are looked at together.
    return math.dist(a, b) / math.sqrt(len(a))
