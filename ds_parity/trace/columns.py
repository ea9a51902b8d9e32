"""Steps as columns of numbers, in memory or read from a file piece by piece: what is compared in bulk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_parity.trace.quick import NAMES, Fields, UnusualError, figures, quick
from ds_parity.trace.reader import follows, parse, pieces, read_header
from ds_parity.trace.records import METRIC, Header, StepRecord, Trace

SIZE = 256
"""Steps of a trace in memory that are taken at once."""
BYTES = 1 << 17
"""Of a file, as many lines as come to this: more no longer fit into a processor's nearer caches, and are slower."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A field of some steps: n values, or n rows of values, and where there is one. Elsewhere numbers mean nothing."""

    values: Array
    known: Array


@dataclass(frozen=True, slots=True)
class WeightsColumn:
    """The weights after some steps: n checksums, norms and sketches, and where they are known; elsewhere empty."""

    checksums: Array
    norms: Array
    sketches: Sequence[Sequence[float]]
    known: Array


_NO_WEIGHTS: tuple[str, float, Sequence[float]] = ("", 0.0, ())


class Columns:
    """Some steps of one trace, ascending.

    Args:
        fields: of `StepRecord`, n values each; weights as tuples of checksum, norm and sketch.
        record: the whole record of a step, by its place.
    """

    def __init__(self, fields: Fields, record: Callable[[int], StepRecord]) -> None:
        self.fields = fields
        self.record = record

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Columns:
        """Columns of records."""
        fields: Fields = {name: [getattr(record, name) for record in records] for name in NAMES}
        fields["weights"] = [it and (it.checksum, it.norm, it.sketch) for it in fields["weights"]]
        return cls(fields, records.__getitem__)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def steps(self) -> Sequence[int]:
        """The steps' numbers."""
        return self.fields["step"]

    def cut(self, start: int, stop: int) -> Columns:
        """Some of the steps, by their places."""
        if start == 0 and stop == len(self):
            return self
        fields = {name: values[start:stop] for name, values in self.fields.items()}
        return Columns(fields, lambda at: self.record(start + at))

    def values(self, name: str) -> Sequence[Any]:
        """A field, or a metric by its prefixed name: n values."""
        if name.startswith(METRIC):
            return [metrics.get(name.removeprefix(METRIC)) for metrics in self.fields["metrics"]]
        return self.fields[name]

    def counts(self, name: str) -> Column:
        """A count, or `skipped` as 0 and 1; (n,) integers."""
        return _column(self.fields[name], np.int64)

    def floats(self, name: str) -> Column:
        """A float, or a metric by its prefixed name; (n,)."""
        return _column(self.values(name), np.float64)

    def widths(self) -> Array:
        """How many LRs each step has, one a parameter group; (n,) integers, 0 where it has none."""
        return np.array([0 if row is None else len(row) for row in self.fields["lr"]], dtype=np.int64)

    def rates(self, width: int) -> Column:
        """LRs, one a parameter group, filled up with zeros to (n, width) floats; no step may have more than `width`."""
        rows = self.fields["lr"]
        padded = ((*row, *(0.0,) * (width - len(row))) if row is not None else (0.0,) * width for row in rows)
        return Column(np.array(list(chain.from_iterable(padded)), dtype=float).reshape(len(rows), width), known(rows))

    def weights(self) -> WeightsColumn:
        """What is known of the weights after each step."""
        rows = [_NO_WEIGHTS if it is None else it for it in self.fields["weights"]]
        checksums, norms, sketches = zip(*rows, strict=True)
        return WeightsColumn(
            checksums=np.array(checksums, dtype=object),
            norms=np.array(norms, dtype=float),
            sketches=sketches,
            known=known(self.fields["weights"]),
        )


def known(values: Sequence[Any]) -> Array:
    """Which of some values are not None; (n,)."""
    if type(None) not in {*map(type, values)}:
        return np.ones(len(values), dtype=bool)
    return np.array([value is not None for value in values], dtype=bool)


def _column(values: Sequence[Any], kind: type) -> Column:
    there = known(values)
    if not there.all():
        values = [0 if value is None else value for value in values]
    return Column(np.array(values, dtype=kind), there)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace of ds_parity's own that is read again and again, and never kept in memory.

    Attributes:
        header: line 1.
        path: of the file.
    """

    header: Header
    path: Path

    @classmethod
    def open(cls, path: str | Path) -> TraceFile:
        """Raises TraceError as `read_header` does."""
        return cls(read_header(path), Path(path))

    def columns(self) -> Iterator[Columns]:
        """All steps, some at a time. Raises TraceError as `iter_steps` does."""
        before: int | None = None
        for number, lines in self._lines():
            columns = self._columns(number, lines)
            for at, step in enumerate(columns.steps):
                follows(self.path, number + at, step, before)
                before = step
            yield columns

    def figures(self) -> Iterator[Fields]:
        """`rollouts`, `loss`, `grad_norm` and `metrics` of all steps, some at a time; nothing else is checked.

        Raises:
            TraceError: a line can't be read.
        """
        for number, lines in self._lines():
            try:
                yield figures(lines)
            except UnusualError:
                yield self._columns(number, lines).fields

    def excerpt(self, first: int, last: int) -> Trace:
        """The steps from `first` to `last` as a trace in memory."""
        wanted = (
            columns.record(at)
            for columns in self.columns()
            for at, step in enumerate(columns.steps)
            if first <= step <= last
        )
        return Trace(self.header, tuple(islice(wanted, last - first + 1)))

    def _lines(self) -> Iterator[tuple[int, list[bytes]]]:
        """Line numbers, and the lines from there on."""
        for number, lines in pieces(self.path, BYTES):
            if number > 1:
                yield number, lines
            elif len(lines) > 1:
                yield 2, lines[1:]

    def _columns(self, number: int, lines: list[bytes]) -> Columns:
        try:
            return Columns(quick(lines), lambda at: StepRecord.model_validate_json(lines[at]))
        except UnusualError:
            return Columns.of([parse(self.path, number + at, line, StepRecord) for at, line in enumerate(lines)])


def columns_of(trace: Trace | TraceFile) -> Iterator[Columns]:
    """The steps of a trace in the order in which it has them, some at a time."""
    if isinstance(trace, TraceFile):
        yield from trace.columns()
    else:
        for start in range(0, len(trace.steps), SIZE):
            yield Columns.of(trace.steps[start : start + SIZE])
