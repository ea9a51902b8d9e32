"""What every foreign format comes down to: rows of columns, all of them text."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

Cell = str | tuple[str, ...]


class SourceRow(NamedTuple):
    """What was logged at once.

    Attributes:
        place: where it is in the file, for messages.
        cells: column to text, or to the texts of a list of several values; empty cells are left out.
        unread: columns with something else that is nested, and a word for it.
    """

    place: str
    cells: Mapping[str, Cell]
    unread: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign file, ready to be read as often as needed.

    Attributes:
        path: the file or folder.
        engine: the trainer or logger that left it.
        rows: begins to read anew with every call, and holds one row at a time where the format allows it. Raises
            TraceError for what can't be read.
        step: the column of steps, where the format itself has one.
        single: its numbers were held in single precision.
        mean_loss: its loss is known to be the mean over the steps since the one logged before.
        every: one step in so many is logged, where the file says so.
        notes: what to know of the file.
    """

    path: Path
    engine: str
    rows: Callable[[], Iterator[SourceRow]]
    step: str | None = None
    single: bool = False
    mean_loss: bool = False
    every: int | None = None
    notes: tuple[str, ...] = ()
