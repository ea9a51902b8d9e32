"""What plots are drawn from: figures by step as arrays, thinned so that no extreme is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_parity.parity.comparison.compare import Setting
from ds_parity.parity.comparison.judge import judge, limits
from ds_parity.trace import Trace
from ds_parity.trace.columns import Columns, TraceFile, columns_of

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

    @property
    def any(self) -> bool:
        """Whether there is a difference, allowed or not."""
        return bool(len(self.odd) or len(self.over[0]) or (self.within[1] > 0).any())


@dataclass(frozen=True)
class Run:
    """What is drawn of one trace.

    Attributes:
        lines: field to its lines, one a parameter group for `lr`; none where the trace has no value.
        skipped: steps that took no update.
    """

    lines: Mapping[str, tuple[Line, ...]]
    skipped: Array


def read_run(trace: Trace | TraceFile, names: Sequence[str], steps: tuple[int, int]) -> Run:
    """Read what is drawn of a trace, in one go.

    Args:
        trace: of a run.
        names: of the fields.
        steps: the first and the last of either trace, so that both are cut into the same stretches.
    """
    bands: dict[str, list[_Band]] = {name: [] for name in names}
    skipped = _Points(1)
    for columns in columns_of(trace):
        x = np.array(columns.steps, dtype=np.int64)
        for name in names:
            for at, values in enumerate(_values(columns, name)):
                if at == len(bands[name]):
                    bands[name].append(_Band(steps))
                bands[name][at].add(x, values)
        skipped.add(x[columns.counts("skipped").values == 1])
    return Run({name: _unlike(it.line() for it in groups) for name, groups in bands.items()}, *skipped.taken())


def _values(columns: Columns, name: str) -> list[Sequence[float | None]]:
    """A field's values; of `lr` those of each parameter group."""
    values = columns.fields[name]
    if name != "lr":
        return [values]
    groups = min(_GROUPS, max((len(value) for value in values if value is not None), default=0))
    return [[None if it is None or at >= len(it) else it[at] for it in values] for at in range(groups)]


def _unlike(lines: Iterator[Line]) -> tuple[Line, ...]:
    """Lines that show something, each once."""
    shown = (one for one in lines if one.finite or len(one.odd))
    return tuple({(one.low.tobytes(), one.high.tobytes(), one.odd.tobytes()): one for one in shown}.values())


class _Band:
    """The least and the greatest of each stretch of steps."""

    def __init__(self, steps: tuple[int, int]) -> None:
        self.first, last = steps
        self.stretch = 1 if last - self.first < DENSE else -(-(last - self.first + 1) // _STRETCHES)
        self.low = np.full((last - self.first) // self.stretch + 1, np.inf)
        self.high = -self.low
        self.odd = _Points(1)

    def add(self, steps: Array, values: Sequence[float | None]) -> None:
        given = np.array([np.nan if value is None else value for value in values], dtype=float)
        present = np.array([value is not None for value in values], dtype=bool)
        drawable = np.isfinite(given) & (np.abs(given) <= _DRAWABLE)
        self.odd.add(steps[present & ~drawable])
        places = (steps - self.first) // self.stretch
        np.minimum.at(self.low, places[drawable], given[drawable])
        np.maximum.at(self.high, places[drawable], given[drawable])

    def line(self) -> Line:
        absent = self.low > self.high
        low, high = (np.where(absent, np.nan, edge) for edge in (self.low, self.high))
        middles = self.first + self.stretch * np.arange(len(low), dtype=float) + (self.stretch - 1) / 2
        (odd,) = self.odd.taken()
        return Line(middles, low, high, odd, self.stretch)


class _Points:
    """Points in the order of their steps, thinned as they come so that the extremes of their last row are kept."""

    def __init__(self, rows: int) -> None:
        self.kept: Array = np.empty((rows, 0))

    def add(self, *rows: Array) -> None:
        self.kept = np.concatenate([self.kept, np.array(rows, dtype=float)], axis=1)
        if self.kept.shape[1] > 8 * MOST:
            self._thin()

    def taken(self) -> tuple[Array, ...]:
        self._thin()
        return tuple(self.kept)

    def _thin(self) -> None:
        self.kept = self.kept[:, thinned(self.kept[-1])]


def line(at: Sequence[int], values: Sequence[float | None], steps: tuple[int, int]) -> Line:
    """Return a line of values at some steps; None breaks it."""
    band = _Band(steps)
    band.add(np.array(at, dtype=np.int64), values)
    return band.line()


def gaps(setting: Setting, names: Sequence[str]) -> dict[str, Gaps]:
    """Return the differences of some quantities (`loss`, `lr`, `grad_norm`, `weights`), which are read in one go."""
    points = {name: (_Points(2), _Points(2), _Points(2), _Points(1)) for name in names}
    for block in setting.blocks():
        judged = judge(block, setting.ruler)
        x = np.array(block.steps, dtype=float)
        for name, (within, over, bound, odd) in points.items():
            bound.add(x, limits(name, block, setting.ruler))
            apart = judged.get("step") or judged.get(name)
            if apart is None:
                continue
            drawn = apart.known & np.isfinite(apart.gap)
            over.add(x[drawn & apart.differs], apart.gap[drawn & apart.differs])
            within.add(x[drawn & ~apart.differs], apart.gap[drawn & ~apart.differs])
            odd.add(x[~drawn & (apart.known | apart.differs)])
    return {
        name: Gaps(within.taken(), over.taken(), bound.taken(), *odd.taken())  # type: ignore[arg-type]
        for name, (within, over, bound, odd) in points.items()
    }


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
