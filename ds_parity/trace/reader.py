"""Reading a trace. Whatever is wrong with it is a TraceError that names the file and the line."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ds_parity.errors import TraceError
from ds_parity.trace.opening import opened
from ds_parity.trace.records import SCHEMA, Header, StepRecord, Trace
from ds_parity.values import object_of, repeated

Model = TypeVar("Model", bound=BaseModel)
_PIECE = 1 << 16


def read_header(path: str | Path) -> Header:
    """Line 1 of a trace.

    Raises:
        TraceError: the file is missing or empty, line 1 is no header, or its schema version isn't `SCHEMA`.
    """
    for _, line in _numbered(path):
        return _header(path, line)
    raise TraceError(f"{path}: the trace is empty: line 1 must be a header")


def iter_steps(path: str | Path) -> Iterator[StepRecord]:
    """The steps of a trace, one at a time: memory stays flat however long the trace is.

    The first step may be any: a resumed run begins where its checkpoint stood. Every other follows its predecessor.

    Raises:
        TraceError: as `read_header`; and, when its line is reached, for a record that is invalid or cut short, and for
            a step that is doubled, missing or out of order.
    """
    read_header(path)
    before: int | None = None
    for number, line in _numbered(path):
        if number == 1:
            continue
        record = parse(path, number, line, StepRecord)
        follows(path, number, record.step, before)
        before = record.step
        yield record


def read_trace(path: str | Path) -> Trace:
    """A whole trace. Raises TraceError as `iter_steps` does."""
    return Trace(header=read_header(path), steps=tuple(iter_steps(path)))


def pieces(path: str | Path, size: int) -> Iterator[tuple[int, list[bytes]]]:
    """Whole lines, about `size` bytes at once, and the number of the first. Raises TraceError as `iter_steps` does."""
    number = 1
    try:
        with opened(path) as file:
            while lines := file.readlines(size):
                if number == 1:
                    lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
                yield number, lines
                number += len(lines)
    except OSError as error:
        raise TraceError(f"{path}: can't read the trace: {error.strerror or error}") from error


def _numbered(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Line numbers, from 1, and lines with their newline."""
    for first, lines in pieces(path, _PIECE):
        yield from enumerate(lines, start=first)


def _header(path: str | Path, line: bytes) -> Header:
    try:
        raw = json.loads(line)
    except ValueError:
        raw = None
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise TraceError(f"{path}, line 1: no header: line 1 must be a JSON object with a `schema_version`")
    if raw["schema_version"] != SCHEMA:
        raise TraceError(f"{path}, line 1: schema version {raw['schema_version']!r}, but this release reads {SCHEMA}")
    return parse(path, 1, line, Header)


def parse(path: str | Path, number: int, line: bytes, model: type[Model]) -> Model:
    """A line. Raises TraceError, which names it, for one that is invalid or cut short, or gives a key twice."""
    try:
        record = model.model_validate_json(line)
    except ValidationError as error:
        if not line.endswith(b"\n"):
            raise TraceError(f"{path}, line {number}: cut short: its writer was stopped in mid-line") from error
        if not line.strip():
            raise TraceError(f"{path}, line {number}: an empty line, which no trace has: remove it") from error
        raise TraceError(f"{path}, line {number}: {_faults(error)}") from error
    for key, _ in repeated(json.loads(line, object_pairs_hook=object_of)):
        raise TraceError(
            f"{path}, line {number}: key {key!r} is given more than once: which of them would count is not defined; "
            "keep one"
        )
    return record


def follows(path: str | Path, number: int, step: int, before: int | None) -> None:
    """Make sure that a step follows the one `before` it, if there is one.

    Raises:
        TraceError: it is doubled, out of order, or others are missing between them.
    """
    if before is not None and step != before + 1:
        raise TraceError(f"{path}, line {number}: {_misplaced(step, before)}")


def _faults(error: ValidationError) -> str:
    """All faults of a record in one line: key, rule, and the value where it is short."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'record'}: {fault['msg']}, got {fault['input']!r:.60}"
        for fault in error.errors(include_url=False)
    )


def _misplaced(step: int, before: int) -> str:
    if step == before:
        return f"step {step} is doubled"
    if step < before:
        return f"step {step} is out of order: it follows step {before}"
    return f"step {before + 1} is missing: step {step} follows step {before}"
