"""JSON Lines, a row an object; and one JSON array of such objects."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ds_parity.errors import TraceError
from ds_parity.trace.foreign.source import Source, SourceRow
from ds_parity.trace.opening import opened


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
        yield SourceRow(place, cells(value))


def parse(text: str | bytes) -> Any:
    """JSON whose numbers stay the text that they were written with; NaN, Infinity and -Infinity are numbers.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(text, parse_float=str, parse_int=str, parse_constant=str)


def cells(value: dict[str, Any]) -> dict[str, str]:
    """What an object says of a step: no nulls, and nothing that is nested."""
    known = ((column, cell) for column, cell in value.items() if isinstance(cell, (str, bool)) and cell != "")
    return {column: str(cell) for column, cell in known}


def _rows(path: Path) -> Iterator[SourceRow]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield SourceRow(f"line {number}", _object(path, number, line))


def _object(path: Path, number: int, line: bytes) -> dict[str, str]:
    try:
        value = parse(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise TraceError(f"{path}, line {number}: cut short: its writer was stopped in mid-line") from error
        raise TraceError(f"{path}, line {number}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}, line {number}: {line[:60]!r} is no object: a line of JSON Lines is one")
    return cells(value)
