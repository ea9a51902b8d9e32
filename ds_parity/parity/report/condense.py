"""What a page shows of a comparison, however long: the steps that matter, and differences by field."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ds_parity.parity.bounds import greatest
from ds_parity.parity.fields import Comparison, Difference, Row
from ds_parity.parity.tables import cells, number

WHOLE = 60
"""A table of this many steps is shown as it is."""
_ENDS = 10
_DIFFERING = 20


@dataclass(frozen=True)
class Line:
    """A line of the table: cells, or where `cells` is empty a note of the steps that are left out there."""

    cells: tuple[str, ...]
    differs: bool = False
    note: str = ""


@dataclass(frozen=True)
class FieldFound:
    """What one field's differences come to: how many, the first, and the furthest apart (None: nothing to subtract)."""

    name: str
    count: int
    first: Difference
    furthest: float | None


def lines(comparison: Comparison) -> tuple[Line, ...]:
    """Return a line a step; of many steps the first, the last, and the first that differ with the step before them."""
    rows = comparison.rows
    return tuple(_lines(rows, _kept(rows)))


def found(comparison: Comparison) -> tuple[FieldFound, ...]:
    """Return the differences by field, in the order in which they are met."""
    held: dict[str, list[Difference]] = {}
    for difference in comparison.differences:
        held.setdefault(difference.field, []).append(difference)
    return tuple(_found(name, differences) for name, differences in held.items())


def _found(name: str, differences: list[Difference]) -> FieldFound:
    known = [one.difference for one in differences if one.difference is not None]
    return FieldFound(name, len(differences), differences[0], greatest(known) if known else None)


def _kept(rows: tuple[Row, ...]) -> list[int]:
    count = len(rows)
    if count <= WHOLE:
        return list(range(count))
    differing = list(islice((at for at, row in enumerate(rows) if row.differences), _DIFFERING))
    kept = {*range(_ENDS), *range(count - _ENDS, count), *differing}
    if differing:
        kept.add(max(0, differing[0] - 1))
    return sorted(kept)


def _lines(rows: tuple[Row, ...], kept: list[int]) -> Iterator[Line]:
    last = -1
    for at in kept:
        if at > last + 1:
            yield Line((), note=_note(rows[last + 1 : at]))
        yield Line(cells(rows[at]), bool(rows[at].differences))
        last = at


def _note(hidden: tuple[Row, ...]) -> str:
    differing = sum(bool(row.differences) for row in hidden)
    told = f"{differing} of them differ" if differing else "all equal"
    return f"{number(len(hidden), 'step')} left out, {hidden[0].step} to {hidden[-1].step}: {told}"
