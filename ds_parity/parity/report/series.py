"""What plots are drawn from: figures by step as arrays, thinned so that no extreme is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_parity.parity.comparison.compare import Setting
from ds_parity.parity.comparison.judge import judge, limits
from ds_parity.parity.report.thinning import Array, Points, StepList, Steps
from ds_parity.trace import Trace
from ds_parity.trace.columns import Columns, TraceFile, columns_of

DENSE = 400
"""Steps of a line; more become a band from the least to the greatest of a stretch of steps."""
_STRETCHES = 250
GROUPS = 8
"""Parameter groups whose learning rates are drawn."""
# Sums of what is drawn must not overflow.
_DRAWABLE = 1e100


@dataclass(frozen=True)
class Line:
    """One run's values of one field.

    Attributes:
        x: steps, or the middles of stretches of `stretch` steps.
        low: the values, or the least of a stretch; NaN where there is none.
        high: the values, or the greatest of a stretch.
        odd: steps whose value is NaN, infinite or beyond 1e100.
        stretch: how many steps a point stands for.
        groups: numbers of the parameter groups that have these values, from 1; of other fields than `lr` just 1.
    """

    x: Array
    low: Array
    high: Array
    odd: Steps
    stretch: int = 1
    groups: tuple[int, ...] = (1,)

    @property
    def finite(self) -> bool:
        """Whether there is a value to draw."""
        return bool(np.isfinite(self.low).any())

    @property
    def values(self) -> tuple[bytes, ...]:
        """What two lines with the same values have in common."""
        return self.low.tobytes(), self.high.tobytes(), self.odd.digest

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
        lines: field to its lines; of `lr` the parameter groups with the same values are one; none where the trace has
            no value.
        skipped: steps that took no update.
        groups: how many parameter groups the trace has; `lines` has the first 8 of them at most.
    """

    lines: Mapping[str, tuple[Line, ...]]
    skipped: Steps
    groups: int = 1


def read_run(trace: Trace | TraceFile, names: Sequence[str], steps: tuple[int, int]) -> Run:
    """Read what is drawn of a trace, in one go.

    Args:
        trace: of a run.
        names: of the fields.
        steps: the first and the last of either trace, so that both are cut into the same stretches.
    """
    bands: dict[str, list[_Band]] = {name: [] for name in names}
    skipped, groups = StepList(), 1
    for columns in columns_of(trace):
        x = np.array(columns.steps, dtype=np.int64)
        for name in names:
            for at, values in enumerate(_values(columns, name)):
                if at == len(bands[name]):
                    bands[name].append(_Band(steps))
                bands[name][at].add(x, values)
        skipped.add(x[columns.counts("skipped").values == 1])
        groups = max(groups, _groups(columns))
    lines = {name: _unlike([it.line() for it in found]) for name, found in bands.items()}
    return Run(lines, skipped.taken(), groups)


def _groups(columns: Columns) -> int:
    """The greatest number of parameter groups that a step has."""
    return max((len(value) for value in columns.fields["lr"] if value is not None), default=0)


def _values(columns: Columns, name: str) -> list[Sequence[float | None]]:
    """A field's values; of `lr` those of each parameter group."""
    values = columns.fields[name]
    if name != "lr":
        return [values]
    groups = min(GROUPS, _groups(columns))
    return [[None if it is None or at >= len(it) else it[at] for it in values] for at in range(groups)]


def _unlike(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Lines that show something, each once, with the numbers of all groups that it stands for."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for number, one in enumerate(lines, start=1):
        if one.finite or one.odd:
            groups.setdefault(one.values, []).append(number)
    return tuple(replace(lines[numbers[0] - 1], groups=tuple(numbers)) for numbers in groups.values())


class _Band:
    """The least and the greatest of each stretch of steps."""

    def __init__(self, steps: tuple[int, int]) -> None:
        self.first, last = steps
        self.stretch = 1 if last - self.first < DENSE else -(-(last - self.first + 1) // _STRETCHES)
        self.low = np.full((last - self.first) // self.stretch + 1, np.inf)
        self.high = -self.low
        self.odd = StepList()

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
        return Line(middles, low, high, self.odd.taken(), self.stretch)


def line(at: Sequence[int], values: Sequence[float | None], steps: tuple[int, int]) -> Line:
    """Return a line of values at some steps; None breaks it."""
    band = _Band(steps)
    band.add(np.array(at, dtype=np.int64), values)
    return band.line()


def gaps(setting: Setting, names: Sequence[str]) -> dict[str, Gaps]:
    """Return the differences of some quantities (`loss`, `lr`, `grad_norm`, `weights`), which are read in one go."""
    points = {name: (Points(2), Points(2), Points(2), Points(1)) for name in names}
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
