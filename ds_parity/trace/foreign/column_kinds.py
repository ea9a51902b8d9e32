"""What the columns of a foreign file contain: numbers, lists of numbers, or what can't be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ds_parity.trace.foreign.source import SourceRow

_SEVERAL = "lists of several numbers"


@dataclass(frozen=True, slots=True)
class ColumnKinds:
    """Columns by what their cells contain, in the order of the file; a column may be of several kinds.

    Attributes:
        single: one value.
        several: lists of several values, which only the LR has: one a parameter group.
        unread: whatever else is nested, and a word for it.
    """

    single: dict[str, None] = field(default_factory=dict)
    several: dict[str, None] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[SourceRow]) -> ColumnKinds:
        """Those of all rows of a file."""
        kinds = cls()
        for row in rows:
            for column, cell in row.cells.items():
                (kinds.single if isinstance(cell, str) else kinds.several)[column] = None
            kinds.unread.update(row.unread)
        return kinds

    def readable(self, name: str) -> Mapping[str, None]:
        """The columns that may be a field."""
        return self.single | self.several if name == "lr" else self.single

    def unreadable(self, name: str) -> Mapping[str, str]:
        """The columns with cells that can't be a field, and what these contain."""
        return self.unread if name == "lr" else {**dict.fromkeys(self.several, _SEVERAL), **self.unread}
