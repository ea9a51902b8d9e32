"""Rows to a trace: rows of one step are put together, and every field is a number or unknown."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from ds_parity.errors import TraceError
from ds_parity.trace.digits import Digits, Precision
from ds_parity.trace.foreign.field_names import COUNTS, ChosenColumns, Maps, choose
from ds_parity.trace.foreign.source import Source, SourceRow
from ds_parity.trace.records import Header, StepRecord, Trace

_ROUNDED = ("loss", "lr", "grad_norm", "loss_scale", "total")
_COUNT_LIMIT = 2**63
_UNKNOWN = dict.fromkeys((*COUNTS, "total", "loss", "lr", "grad_norm", "skipped"))


@dataclass(slots=True)
class _Gathered:
    """What rows come to: step to column to number, in the order of the file, and each field's digits."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
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
    present = dict.fromkeys(column for row in source.rows() for column in row.cells)
    if not present:
        raise TraceError(f"{source.path}: it holds no row with a value: a trace has at least one step")
    columns = choose(source, present, maps)
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
        known = {column: row.cells[column] for column in field_of if column in row.cells}
        if known:
            step = gathered.steps.setdefault(_step(source, row, columns), {})
            _merge(source, row, step, known, field_of, gathered.digits)
    if not gathered.steps:
        raise TraceError(f"{source.path}: no row has a step: a trace has at least one")
    return gathered


def _merge(
    source: Source,
    row: SourceRow,
    step: dict[str, float],
    known: dict[str, str],
    field_of: dict[str, str],
    digits: dict[str, Digits],
) -> None:
    for column, text in known.items():
        name = field_of[column]
        number = _number(source, row, column, text)
        if name in COUNTS and not (number.is_integer() and 0 <= number < _COUNT_LIMIT):
            raise TraceError(f"{_at(source, row)}: {name} ({column!r}) is {text}: a count is a whole number from 0")
        if column in step and struct.pack("<d", step[column]) != struct.pack("<d", number):
            raise TraceError(
                f"{_at(source, row)}: the step has two values of {name} ({column!r}), {step[column]!r} and {number!r}: "
                "leave only those of one run, without what a restart logged again"
            )
        step[column] = number
        if name in digits:
            digits[name].add(text)


def _step(source: Source, row: SourceRow, columns: ChosenColumns) -> int:
    (column,) = columns.of["step"]
    if column not in row.cells:
        raise TraceError(f"{_at(source, row)}: the row has values but no step ({column!r})")
    number = _number(source, row, column, row.cells[column])
    if not number.is_integer() or abs(number) >= _COUNT_LIMIT:
        raise TraceError(f"{_at(source, row)}: step ({column!r}) is {row.cells[column]}: it must be a whole number")
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


def _record(step: int, cells: dict[str, float], columns: ChosenColumns) -> StepRecord:
    values: dict[str, object] = {**_UNKNOWN, "step": step}
    for name, wanted in columns.of.items():
        known = tuple(cells[column] for column in wanted if column in cells)
        if name == "step" or len(known) != len(wanted):
            continue
        values[name] = known if name == "lr" else int(known[0]) if name in COUNTS else known[0]
    return StepRecord(**values)  # type: ignore[arg-type]


def _precision(gathered: _Gathered, single: bool) -> Iterator[tuple[str, Precision]]:
    for name, digits in gathered.digits.items():
        precision = digits.precision(single) if digits.texts else None
        if precision is not None:
            yield name, precision


def _at(source: Source, row: SourceRow) -> str:
    return f"{source.path}, {row.place}"
