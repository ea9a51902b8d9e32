"""What comparing comes to, block by block: as much as can be shown, and sums of the rest.

It does not grow with the traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ds_parity.parity.comparison.blocks import Block
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.crossings import Crossings
from ds_parity.parity.comparison.distances import signed
from ds_parity.parity.comparison.fields import (
    BOUNDED,
    NAMES,
    Difference,
    FieldFound,
    HiddenRows,
    Measured,
    Row,
    TraceTotals,
)
from ds_parity.parity.comparison.judge import Apart, Judged, judge
from ds_parity.parity.comparison.rows import row
from ds_parity.parity.comparison.ruler import Ruler
from ds_parity.trace.columns import Array, Columns
from ds_parity.trace.records import METRIC

WHOLE = 1000
"""Of so many steps every row is kept, and so many differences; the others are counted."""
LOOSE = 0.1
"""A part of a value; to be equal within a bound above it says little."""
_SILENT = ("loss", "grad_norm")
ENDS, DIFFERING = 10, 20
"""Of more steps: rows at either end, and of those that differ."""


class _Entry(NamedTuple):
    """Where a row is found that may be shown: its place among all, its block and its place there."""

    place: int
    block: Block
    judged: Judged
    at: int
    differing_before: int


@dataclass
class _Means:
    """Sums over the steps in which both traces have a field: of differences, of both values, terms and slack."""

    count: int = 0
    sums: Array = field(default_factory=lambda: np.zeros(5))

    def add(self, *columns: Array) -> None:
        """Add steps, in their order: blocks of another size come to the same sums."""
        with np.errstate(all="ignore"):
            together = np.concatenate([self.sums[:, None], np.stack(columns)], axis=1)
            self.sums = np.add.accumulate(together, axis=1)[:, -1]
        self.count += len(columns[0])


@dataclass(frozen=True, slots=True)
class Moved:
    """The step in which weights that never moved would stand out most: their distance, and the bound that it has.

    Both are relative to the norm of the weights.
    """

    distance: float
    bound: float

    @property
    def part(self) -> float:
        """The distance in bounds: above 1 where weights that never moved would be found."""
        return self.distance / self.bound if self.bound else np.inf


@dataclass
class Tally:
    """Takes blocks in their order."""

    ruler: Ruler
    steps: int = 0
    terms: int = 0
    differing: int = 0
    shared: bool = False
    seen: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)
    slack: dict[str, float] = field(default_factory=dict)
    signal: Moved | None = None
    rounded: bool = False
    silent: dict[str, bool] = field(default_factory=dict)
    greatest: dict[str, float] = field(default_factory=dict)
    _fields: dict[str, FieldFound] = field(default_factory=dict)
    _measured: dict[str, tuple[float, Measured]] = field(default_factory=dict)
    _means: dict[str, _Means] = field(default_factory=lambda: {"loss": _Means(), "grad_norm": _Means()})
    _crossings: dict[str, Crossings] = field(default_factory=lambda: {"loss": Crossings(), "grad_norm": Crossings()})
    _rows: dict[int, tuple[Row, int]] = field(default_factory=dict)
    _first: list[_Entry] = field(default_factory=list)
    _last: deque[_Entry] = field(default_factory=lambda: deque(maxlen=ENDS))
    _held: dict[str, TraceTotals] = field(
        default_factory=lambda: {"reference": TraceTotals(0, 0), "candidate": TraceTotals(0, 0)}
    )

    def take(self, blocks: Iterable[Block]) -> Tally:
        """Take all blocks; returns itself."""
        for block in blocks:
            self._take(block)
        return self

    @property
    def held(self) -> tuple[TraceTotals, TraceTotals]:
        """What the reference and the candidate hold."""
        return self._held["reference"], self._held["candidate"]

    @property
    def measured(self) -> tuple[Measured, ...]:
        """Each field that may differ, where its difference is the greatest part of what it may be."""
        loose = {name for name, most in self.slack.items() if most > LOOSE}
        return tuple(
            self._measured[name][1] for name in NAMES if name in self._measured and name in loose.union(BOUNDED)
        )

    def found(self, before: Iterable[Difference], after: Iterable[Difference]) -> tuple[FieldFound, ...]:
        """All differences by field, those of no single step among them."""
        fields: dict[str, FieldFound] = {}
        steps = self._fields.values()
        for one in (*map(FieldFound.of, before), *steps, *map(FieldFound.of, after)):
            fields[one.name] = fields[one.name].and_also(one) if one.name in fields else one
        return tuple(fields.values())

    def rows(self) -> tuple[tuple[Row, ...], tuple[HiddenRows, ...]]:
        """The rows to show, and what lies between them: every row of few steps."""
        self._show((*self._first, *self._last))
        if self.steps <= WHOLE:
            return tuple(self._rows[place][0] for place in range(self.steps)), ()
        differing = [place for place, (kept, _) in sorted(self._rows.items()) if kept.differences][:DIFFERING]
        wanted = {*range(ENDS), *differing, *(entry.place for entry in self._last)}
        wanted |= {place - 1 for place in differing[:1] if place}
        chosen = [(place, *self._rows[place]) for place in sorted(wanted)]
        hidden = []
        for (i, first, before), (j, last, after) in pairwise(chosen):
            if j > i + 1:
                count = after - before - bool(first.differences)
                hidden.append(HiddenRows(first.step, last.step, j - i - 1, count))
        return tuple(kept for _, kept, _ in chosen), tuple(hidden)

    def biases(self) -> Iterator[Difference]:
        """What stays within its bound in every step, always on the same side, or on a grid in too many steps."""
        for name, means in self._means.items():
            if self.ruler.tier is Tier.EXACT or means.count < 2:
                continue
            mean, a, b, terms, slack = (means.sums / means.count).tolist()
            # Rounding to few digits may err to one side for ever, as where a loss no longer moves: it does not average
            # out.
            bound = self.ruler.bound(name, terms).mean(means.count) + slack
            if not abs(mean) <= bound:
                why = f"{name} is off to one side over {means.count} steps: rounding averages out, a bias does not"
                yield Difference(None, f"{name}, mean", a, b, mean, bound, why)
        yield from filter(None, (crossings.difference(name) for name, crossings in self._crossings.items()))

    def _take(self, block: Block) -> None:
        judged = judge(block, self.ruler)
        differs = np.zeros(len(block.steps), dtype=bool)
        for apart in judged.values():
            differs |= apart.differs
        self._look_at(block)
        self._keep(block, differs, judged)
        for name, apart in judged.items():
            self.shared |= bool(apart.known.any())
            if name in self.ruler.written:
                self.slack[name] = max(self.slack.get(name, 0.0), float(apart.slack.max()))
            if name in _SILENT and apart.known.any():
                self.silent[name] = self.silent.get(name, True) and _is_zero(block, name, apart.known)
            if name.startswith(METRIC) and block.candidate is not None:
                self._of_metric(name, np.abs(block.candidate.floats(name).values[apart.known]))
            self.rounded |= bool((apart.known & ~apart.differs & (apart.gap > 0)).any())
            bounded = name in BOUNDED or name in self.ruler.written
            if self.ruler.tier is not Tier.EXACT and bounded and apart.known.any():
                self._measure(name, block, apart)
        self.shared |= (
            block.reference is not None and block.candidate is not None and "metrics" not in self.ruler.left_out
        )
        self.steps += len(differs)
        self.differing += int(differs.sum())
        self.terms = block.terms[-1]

    def _of_metric(self, name: str, sizes: Array) -> None:
        most = float(sizes[np.isfinite(sizes)].max(initial=0.0))
        self.greatest[name] = max(self.greatest.get(name, 0.0), most)

    def _look_at(self, block: Block) -> None:
        for side, columns in (("reference", block.reference), ("candidate", block.candidate)):
            if columns is not None:
                self._held[side] = self._held[side].and_also(columns.fields["rollouts"])
                self.seen |= {name for name in NAMES if name not in self.seen and _present(columns, name)}

    def _keep(self, block: Block, differs: Array, judged: Judged) -> None:
        """Keep rows and differences, as long as there are not too many."""
        before = self.differing + np.cumsum(differs) - differs
        apart = np.flatnonzero(differs).tolist()

        def entry(at: int) -> _Entry:
            return _Entry(self.steps + at, block, judged, at, int(before[at]))

        @cache
        def worded(at: int) -> Row:
            return row(block, judged, at, self.ruler)

        if apart and not self.differing:  # the step before the first that differs is shown too
            self._show([entry(apart[0] - 1)] if apart[0] else [*self._last][-1:])
        for at in apart[: max(0, DIFFERING - self.differing)]:
            self._rows[self.steps + at] = worded(at), int(before[at])
        for at in apart[: max(0, WHOLE - len(self.differences))]:  # each has one difference or more
            if len(self.differences) < WHOLE:
                self.differences += worded(at).differences
        self._count(judged, worded)
        count = len(differs)
        if self.steps < WHOLE:
            most = WHOLE if self.steps + count <= WHOLE else ENDS
            self._first = [*self._first, *map(entry, range(count))][:most]
        self._last.extend(map(entry, range(max(0, count - ENDS), count)))

    def _show(self, entries: Iterable[_Entry]) -> None:
        """Keep rows, unless they are kept already."""
        for place, block, judged, at, before in entries:
            if place not in self._rows:
                self._rows[place] = row(block, judged, at, self.ruler), before

    def _count(self, judged: Judged, worded: Callable[[int], Row]) -> None:
        """Count the differences of each field, in the order in which fields first differ."""
        places = {name: int(apart.differs.argmax()) for name, apart in judged.items() if apart.differs.any()}
        for name, first in sorted(places.items(), key=lambda item: item[1]):

            def difference(at: int, name: str = name) -> Difference:
                (found,) = (it for it in worded(at).differences if it.field == name)
                return found

            apart, known = judged[name], self._fields.get(name)
            both = apart.differs & apart.known
            gaps, count = apart.gap[both], int(apart.differs.sum())
            furthest = float(gaps.max()) if len(gaps) else None
            # A step that one side leaves out is no value that one side has.
            told = apart.differs if name == "step" else both
            wanted = told.any() and (known is None or known.of_both is None)
            of_both = difference(int(told.argmax())) if wanted else None
            begin = known.first if known is not None else difference(first)
            found = FieldFound(name, count, begin, furthest, count - int(told.sum()), of_both)
            self._fields[name] = found if known is None else known.and_also(found)

    def _measure(self, name: str, block: Block, apart: Apart) -> None:
        places = np.flatnonzero(apart.known)
        gap, limit = apart.gap[places], apart.limit[places]
        with np.errstate(all="ignore"):
            part = np.where(np.isnan(gap), np.inf, np.where(gap == 0, 0.0, gap / limit))
        most = int(part.argmax())
        if name not in self._measured or part[most] > self._measured[name][0]:
            step = block.steps[places[most]]
            self._measured[name] = float(part[most]), Measured(name, step, float(gap[most]), float(limit[most]))
        if name == "weights":
            self._weigh(block, apart)
        if name in self._means:
            assert block.reference is not None
            assert block.candidate is not None
            x, y = (side.floats(name).values[places] for side in (block.reference, block.candidate))
            terms = np.array(block.terms, dtype=float)[places]
            self._means[name].add(signed(x, y, self.ruler.scale(name)), x, y, terms, apart.slack[places])
            self._cross(name, x, y, limit - apart.slack[places], apart.slack[places])

    def _cross(self, name: str, x: Array, y: Array, bound: Array, slack: Array) -> None:
        """Count what was rounded to one grid; both sides together leave one of its units open."""
        on = self.ruler.one_grid(name, x, y)
        if on.any():
            apart = np.abs(signed(x, y, self.ruler.scale(name))) > slack / 2
            self._crossings[name].add(x[on], y[on], bound[on], slack[on], apart[on])

    def _weigh(self, block: Block, apart: Apart) -> None:
        """Keep the greatest signal, and the first where there is none."""
        away = np.where(apart.known & np.isfinite(block.travelled.away), block.travelled.away, -1.0)
        with np.errstate(all="ignore"):
            parts = np.where(away >= 0, away / apart.limit, -1.0)
        most = int(parts.argmax())
        if away[most] >= 0 and (self.signal is None or parts[most] > self.signal.part):
            self.signal = Moved(float(away[most]), float(apart.limit[most]))


def _is_zero(block: Block, name: str, places: Array) -> bool:
    """Whether a float is 0 in both traces at all of some places."""
    sides = [side.floats(name).values[places] for side in (block.reference, block.candidate) if side is not None]
    return not any(values.any() for values in sides)


def _present(columns: Columns, name: str) -> bool:
    values = columns.fields[name]
    return any(values) if name == "metrics" else {*map(type, values)} != {type(None)}
