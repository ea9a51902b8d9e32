"""What plots are drawn from: figures by step as arrays, thinned so that no extreme is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_parity.parity.fields import Comparison, Row, value_of
from ds_parity.trace import Trace

MOST = 1600
"""Points of a panel; more would not be seen."""
DENSE = 400
"""Steps of a line; more become a band from the least to the greatest of a stretch of steps."""
_STRETCHES = 250
_GROUPS = 8
# Sums of what is drawn must not overflow.
_DRAWABLE = 1e100

Array = NDArray[Any]


@dataclass(frozen=True)
class Line:
    """One run's values of one field.

    Attributes:
        x: steps, or the middles of stretches of `stretch` steps.
        low: the values, or the least of a stretch; NaN where there is none.
        high: the values, or the greatest of a stretch.
        odd: steps whose value is NaN, infinite or beyond 1e100.
        stretch: how many steps a point stands for.
    """

    x: Array
    low: Array
    high: Array
    odd: Array
    stretch: int = 1

    @property
    def finite(self) -> bool:
        """Whether there is a value to draw."""
        return bool(np.isfinite(self.low).any())

    @property
    def alone(self) -> Array:
        """Indices of points without a neighbour, which a line would not show."""
        known = np.concatenate([[False], np.isfinite(self.low), [False]])
        return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])


@dataclass(frozen=True)
class Gaps:
    """How far two traces lie apart in one quantity, step by step: (x, y) each.

    Attributes:
        within: differences that are allowed, 0 for none.
        over: those that are not; a difference can be 0 where a checksum differs.
        bound: what they may be.
        odd: steps in which the difference is NaN or infinite, or one trace has no value.
    """

    within: tuple[Array, Array]
    over: tuple[Array, Array]
    bound: tuple[Array, Array]
    odd: Array


def lines_of(trace: Trace, name: str, steps: tuple[int, int]) -> tuple[Line, ...]:
    """Return a trace's values of a field, a line a parameter group for `lr`; none where it has no value.

    Args:
        trace: of a run.
        name: of a field.
        steps: the first and the last of either trace, so that both are cut into the same stretches.
    """
    records = {record.step: record for record in trace.steps}
    values = [value_of(record, name) for record in records.values()]
    made = (line(list(records), column, steps) for column in _columns(values))
    return tuple(one for one in made if one.finite or len(one.odd))


def _columns(values: Sequence[Any]) -> list[tuple[float | None, ...]]:
    if not any(isinstance(value, tuple) for value in values):
        return [tuple(values)]
    groups = min(_GROUPS, max(len(value) for value in values))
    columns = [tuple(value[at] if at < len(value) else None for value in values) for at in range(groups)]
    return list(dict.fromkeys(columns))


def line(at: Sequence[int], values: Sequence[float | None], steps: tuple[int, int]) -> Line:
    """Return a line of values at some steps; None breaks it."""
    first, last = steps
    stretch = 1 if last - first < DENSE else -(-(last - first + 1) // _STRETCHES)
    given = np.array([np.nan if value is None else value for value in values], dtype=float)
    present = np.array([value is not None for value in values], dtype=bool)
    drawable = np.isfinite(given) & (np.abs(given) <= _DRAWABLE)
    x = np.array(at, dtype=float)
    odd = x[present & ~drawable]
    places = np.array([(step - first) // stretch for step in at], dtype=int)
    low = np.full((last - first) // stretch + 1, np.inf)
    high = -low
    np.minimum.at(low, places[drawable], given[drawable])
    np.maximum.at(high, places[drawable], given[drawable])
    absent = low > high
    low[absent] = high[absent] = np.nan
    middles = first + stretch * np.arange(len(low), dtype=float) + (stretch - 1) / 2
    return Line(middles, low, high, odd[thinned(odd)], stretch)


def gaps(comparison: Comparison, reference: Trace, name: str) -> Gaps:
    """Return the differences of a quantity: `loss`, `lr`, `grad_norm` or `weights`."""
    steps = {record.step for record in reference.steps}
    within: list[tuple[int, float]] = []
    over: list[tuple[int, float]] = []
    odd: list[int] = []
    for row in comparison.rows:
        value = getattr(row, name)
        differs = any(difference.field == name for difference in row.differences)
        if value is not None and np.isfinite(value):
            (over if differs else within).append((row.step, value))
        elif value is not None or differs or row.candidate is None or row.step not in steps:
            odd.append(row.step)
    x = np.array(odd, dtype=float)
    return Gaps(_points(within), _points(over), _bound(comparison, name), x[thinned(x)])


def skipped(rows: Sequence[Row], reference: Trace) -> Array:
    """Return the steps that either trace skipped."""
    steps = {record.step for record in reference.steps if record.skipped}
    steps |= {row.step for row in rows if row.candidate is not None and row.candidate.skipped}
    x = np.array(sorted(steps), dtype=float)
    return x[thinned(x)]


def thinned(y: Array) -> Array:
    """Return indices of at most about `MOST` points: of each stretch the ends, the extremes and the first break."""
    if len(y) <= MOST:
        return np.arange(len(y))
    stretches = np.array_split(np.arange(len(y)), MOST // 5)
    return np.array(sorted({at for stretch in stretches for at in _extremes(y, stretch)}))


def _extremes(y: Array, stretch: Array) -> Iterator[int]:
    yield from (int(stretch[0]), int(stretch[-1]))
    held = y[stretch]
    broken = np.isnan(held)
    if not broken.all():
        yield from (int(stretch[np.nanargmin(held)]), int(stretch[np.nanargmax(held)]))
    if broken.any():
        yield int(stretch[np.argmax(broken)])


def _points(held: list[tuple[int, float]]) -> tuple[Array, Array]:
    x, y = np.array(held, dtype=float).reshape(-1, 2).T
    kept = thinned(y)
    return x[kept], y[kept]


def _bound(comparison: Comparison, name: str) -> tuple[Array, Array]:
    return _points([(row.step, comparison.bound(name, row.terms)) for row in comparison.rows])
