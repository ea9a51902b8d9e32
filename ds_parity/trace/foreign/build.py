"""Rows to a trace: rows of one step are put together, and every field is a number or unknown."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from ds_parity.errors import TraceError
from ds_parity.trace.digits import Digits, Precision
from ds_parity.trace.foreign.column_kinds import ColumnKinds
from ds_parity.trace.foreign.field_names import COUNTS, ChosenColumns, Maps, choose
from ds_parity.trace.foreign.source import Cell, Source, SourceRow
from ds_parity.trace.records import Header, StepRecord, Trace

_ROUNDED = ("loss", "lr", "grad_norm", "loss_scale", "total")
_COUNT_LIMIT = 2**63
_UNKNOWN = dict.fromkeys((*COUNTS, "total", "loss", "lr", "grad_norm", "skipped"))


@dataclass(slots=True)
class _Gathered:
    """What rows come to: step to column to its numbers, in the order of the file, and each field's digits."""

    steps: dict[int, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    digits: dict[str, Digits] = field(default_factory=lambda: {name: Digits() for name in _ROUNDED})


def build(source: Source, maps: Maps, mean_loss: bool = False) -> Trace:
    """Read a foreign file.

    It is read twice: for its columns, then for their values. Rows of the same step are put together; rows without any
    of the wanted columns (evaluations, summaries, configurations) are passed over.

    Args:
        source: the file.
        maps: field to columns, as asked for; the rest goes by known names.
        mean_loss: its loss is the mean over the steps since the one logged before.

    Raises:
        TraceError: a column is absent or ambiguous; a cell is no number; a step is not a whole number from 1; a step
            has two values of a field; there is no step at all.
    """
    kinds = ColumnKinds.of(source.rows())
    if not (kinds.single or kinds.several or kinds.unread):
        raise TraceError(f"{source.path}: it holds no row with a value: a trace has at least one step")
    columns = choose(source, kinds, maps)
    gathered = _gather(source, columns)
    order = list(gathered.steps)
    notes = [
        *source.notes,
        *columns.notes,
        *["its steps are out of order: they were sorted"] * (order != sorted(order)),
    ]
    return Trace(
        header=_header(source, columns),
        steps=tuple(_record(step, gathered.steps[step], columns) for step in sorted(order)),
        precision=dict(_precision(gathered, source.single)),
        mean_loss=source.mean_loss or mean_loss,
        every=source.every,
        notes=tuple(notes),
    )


def _header(source: Source, columns: ChosenColumns) -> Header:
    unknown = dict.fromkeys(("scenario", "seed", "versions", "device", "ranks", "config_hash"))
    records = tuple(name for name in columns.of if name != "step")
    return Header(**unknown, engine=source.engine, records=records)  # type: ignore[arg-type]


def _gather(source: Source, columns: ChosenColumns) -> _Gathered:
    gathered = _Gathered()
    field_of = {column: name for name, wanted in columns.of.items() if name != "step" for column in wanted}
    for row in source.rows():
        known = {column: texts for column in field_of if (texts := _texts(row, field_of[column], column))}
        if known:
            step = gathered.steps.setdefault(_step(source, row, columns), {})
            _merge(source, row, step, known, field_of, gathered.digits)
    if not gathered.steps:
        raise TraceError(f"{source.path}: no row has a step: a trace has at least one")
    return gathered


def _texts(row: SourceRow, name: str, column: str) -> tuple[str, ...]:
    """The numbers of a cell; none where it is empty, or a list under a field that has one number."""
    cell: Cell = row.cells.get(column, ())
    return (cell,) if isinstance(cell, str) else cell if name == "lr" else ()


def _merge(
    source: Source,
    row: SourceRow,
    step: dict[str, tuple[float, ...]],
    known: dict[str, tuple[str, ...]],
    field_of: dict[str, str],
    digits: dict[str, Digits],
) -> None:
    for column, texts in known.items():
        name = field_of[column]
        numbers = tuple(_number(source, row, column, text) for text in texts)
        if name in COUNTS and not (numbers[0].is_integer() and 0 <= numbers[0] < _COUNT_LIMIT):
            raise TraceError(f"{_at(source, row)}: {name} ({column!r}) is {texts[0]}: a count is a whole number from 0")
        if column in step and _bits(step[column]) != _bits(numbers):
            raise TraceError(
                f"{_at(source, row)}: the step has two values of {name} ({column!r}), {_shown(step[column])} and "
                f"{_shown(numbers)}: leave only those of one run, without what a restart logged again"
            )
        step[column] = numbers
        for text in texts if name in digits else ():
            digits[name].add(text)


def _bits(numbers: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def _shown(numbers: tuple[float, ...]) -> str:
    return repr(numbers[0]) if len(numbers) == 1 else repr(list(numbers))


def _step(source: Source, row: SourceRow, columns: ChosenColumns) -> int:
    (column,) = columns.of["step"]
    texts = _texts(row, "step", column)
    if not texts:
        raise TraceError(f"{_at(source, row)}: the row has values but no step ({column!r})")
    number = _number(source, row, column, texts[0])
    if not number.is_integer() or abs(number) >= _COUNT_LIMIT:
        raise TraceError(f"{_at(source, row)}: step ({column!r}) is {texts[0]}: it must be a whole number")
    step = int(number) + columns.shift
    if step < 1:
        raise TraceError(
            f"{_at(source, row)}: step {step}: steps are counted from 1; if this is the first step, and not the state "
            f"before it, write --map 'step={column}{columns.shift + 1 - step:+d}'"
        )
    return step


def _number(source: Source, row: SourceRow, column: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is None or "_" in text:
        raise TraceError(f"{_at(source, row)}: {column!r} is {text!r:.60}: it must be a number")
    if source.single and math.isfinite(number):
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    return number


def _record(step: int, cells: dict[str, tuple[float, ...]], columns: ChosenColumns) -> StepRecord:
    values: dict[str, object] = {**_UNKNOWN, "step": step}
    for name, wanted in columns.of.items():
        if name == "step" or not all(column in cells for column in wanted):
            continue
        known = tuple(number for column in wanted for number in cells[column])
        values[name] = known if name == "lr" else int(known[0]) if name in COUNTS else known[0]
    return StepRecord(**values)  # type: ignore[arg-type]


def _precision(gathered: _Gathered, single: bool) -> Iterator[tuple[str, Precision]]:
    for name, digits in gathered.digits.items():
        precision = digits.precision(single) if digits.texts else None
        if precision is not None:
            yield name, precision


def _at(source: Source, row: SourceRow) -> str:
    return f"{source.path}, {row.place}"
