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
        path: the lengths of all updates so far, added up (`Travel`: some count for more); (n,).
        spread: the root of the sum of their squares: how far they lead, each in a direction of its own; (n,).
        away: the distance from the start, which is never more than the path; (n,).
    """

    path: Array
    spread: Array
    away: Array

    @classmethod
    def unknown(cls, steps: int) -> Travelled:
        """Nothing of so many steps."""
        return cls(*np.full((3, steps), np.nan))


_UNKNOWN = (math.nan, math.nan, math.nan)


class Travel:
    """Follows the weights of one trace from its start, block by block; both lengths are estimates from sketches.

    Args:
        start: where they were before the first step, None where the trace doesn't say. Then the way is unknown, and
            `away` is counted from the first step that has weights: less than it really is.
        usual: the gradient's norm as it mostly is (>= 0). A gradient can be far smaller where the rollouts of a window
            cancel, and is only as exact as they are: its update counts as if it were of that norm.
    """

    def __init__(self, start: Start | None, usual: float = 0.0) -> None:
        self._usual = usual
        self._start: Sequence[float] | None = start.sketch if start is not None and start.sketch else None
        self._here: Sequence[float] | None = self._start
        self._path = self._squares = 0.0 if self._start is not None else math.nan

    def along(self, columns: Columns) -> Travelled:
        """Follow the next steps of the trace."""
        fields = columns.fields
        lengths = [self._one(it, norm) for it, norm in zip(fields["weights"], fields["grad_norm"], strict=True)]
        return Travelled(*np.array(lengths, dtype=float).reshape(-1, 3).T)

    def _one(
        self, weights: tuple[str, float, Sequence[float]] | None, gradient: float | None
    ) -> tuple[float, float, float]:
        if weights is None:
            return _UNKNOWN
        _, norm, sketch = weights
        if self._start is None:
            self._start = self._here = sketch or None
        if self._start is None or self._here is None or len(sketch) != len(self._start):
            return _UNKNOWN
        update, self._here = _distance(self._here, sketch), sketch
        if gradient and 0 < gradient < self._usual:
            update *= self._usual / gradient
        self._path += update
        self._squares += update * update
        away = _distance(self._start, sketch)
        if math.isnan(self._path) and not away:
            away = math.nan  # it may have moved before the first step that is known
        if not 0 < norm < math.inf:
            return _UNKNOWN
        return self._path / norm, math.sqrt(self._squares) / norm, away / norm


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    # math.dist and not numpy: it does not depend on how many steps are looked at together.
    return math.dist(a, b) / math.sqrt(len(a))
