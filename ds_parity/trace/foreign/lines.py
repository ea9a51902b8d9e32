"""JSON Lines, a row an object; and one JSON array of such objects."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ds_parity.errors import TraceError
from ds_parity.trace.foreign.source import Cell, Source, SourceRow
from ds_parity.trace.opening import opened
from ds_parity.values import Repeated, object_of


def json_lines(path: Path) -> Source:
    """A file with an object a line, as `run.scan_history()` of Weights & Biases gives and many trainers write.

    It is read a line at a time. Its first line must be one that `parse` takes.
    """
    first = next(_rows(path), None)
    engine = "wandb" if first is not None and "_step" in first.cells else "json lines"
    return Source(path, engine, partial(_rows, path))


def json_rows(path: Path, engine: str, values: list[Any], name: str) -> Iterator[SourceRow]:
    """The rows of a list that was read whole; `name` is that of an item in messages."""
    for number, value in enumerate(values, start=1):
        place = f"{name} {number}"
        if not isinstance(value, dict):
            raise TraceError(f"{path}, {place}: {engine}: {value!r:.60} is no object")
        yield _row(path, place, value)


def parse(text: str | bytes) -> Any:
    """JSON whose numbers stay the text that they were written with; NaN, Infinity and -Infinity are numbers.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(text, parse_float=str, parse_int=str, parse_constant=str, object_pairs_hook=object_of)


def _row(path: Path, place: str, value: dict[str, Any]) -> SourceRow:
    """What an object says of a step: no nulls, and of what is nested only lists of values."""
    if isinstance(value, Repeated) and value.ambiguous:
        raise TraceError(
            f"{path}, {place}: the row has the key {value.ambiguous[0]!r} twice, with two values: leave the one that "
            "is meant"
        )
    cells: dict[str, Cell] = {}
    unread: dict[str, str] = {}
    for column, cell in value.items():
        values = [str(it) for it in (cell if isinstance(cell, list) else [cell]) if isinstance(it, (str, bool))]
        if isinstance(cell, dict):
            unread[column] = "objects"
        elif isinstance(cell, list) and (not cell or len(values) != len(cell)):
            unread[column] = "lists of other things than numbers" if cell else "lists without a number"
        elif any(values):
            cells[column] = values[0] if len(values) == 1 else tuple(values)
    return SourceRow(place, cells, unread)


def _rows(path: Path) -> Iterator[SourceRow]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _row(path, f"line {number}", _object(path, number, line))


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = parse(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise TraceError(f"{path}, line {number}: cut short: its writer was stopped in mid-line") from error
        raise TraceError(f"{path}, line {number}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}, line {number}: {line[:60]!r} is no object: a line of JSON Lines is one")
    return value
