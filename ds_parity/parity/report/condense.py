"""What a page shows of a comparison, however long: the steps that matter."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from ds_parity.parity.comparison.fields import Comparison, HiddenRows, Row
from ds_parity.parity.comparison.tally import DIFFERING, ENDS
from ds_parity.parity.report.terminal import cells, hidden_rows, in_order

WHOLE = 60
"""A table of this many steps is shown as it is."""


@dataclass(frozen=True)
class TableLine:
    """A line of the table: cells, or where `cells` is empty a note of the steps that are left out there."""

    cells: tuple[str, ...]
    differs: bool = False
    note: str = ""


def lines(comparison: Comparison) -> tuple[TableLine, ...]:
    """Return a line a step; of many steps the first, the last, and the first that differ with the step before them."""
    rows, hidden = comparison.rows, comparison.hidden
    if not hidden and len(rows) > WHOLE:
        kept = _kept(rows)
        hidden = tuple(_hidden(rows, kept))
        rows = tuple(rows[at] for at in kept)
    return tuple(
        TableLine((), note=hidden_rows(one))
        if isinstance(one, HiddenRows)
        else TableLine(cells(one), bool(one.differences))
        for one in in_order(rows, hidden)
    )


def _kept(rows: tuple[Row, ...]) -> list[int]:
    count = len(rows)
    differing = list(islice((at for at, row in enumerate(rows) if row.differences), DIFFERING))
    kept = {*range(ENDS), *range(count - ENDS, count), *differing}
    if differing:
        kept.add(max(0, differing[0] - 1))
    return sorted(kept)


def _hidden(rows: tuple[Row, ...], kept: list[int]) -> Iterator[HiddenRows]:
    for first, last in pairwise(kept):
        if between := rows[first + 1 : last]:
            differing = sum(bool(row.differences) for row in between)
            yield HiddenRows(rows[first].step, rows[last].step, len(between), differing)
