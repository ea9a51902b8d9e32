"""What a file is, by what it holds; its name only tells event files."""

from functools import partial
from pathlib import Path
from typing import Any

from ds_parity.errors import TraceError
from ds_parity.trace.foreign.events import PATTERN, events
from ds_parity.trace.foreign.lines import json_lines, json_rows, parse
from ds_parity.trace.foreign.source import Source
from ds_parity.trace.foreign.table import table
from ds_parity.trace.foreign.trainer_state import trainer_state
from ds_parity.trace.opening import is_pipe, opened
from ds_parity.trace.records import HYPOTHESES, StepRecord

_STATE = "trainer_state.json"
_EVENT = b"brain.Event"  # the version that every event file begins with
_HEAD = 1 << 16
_KINDS = "JSON Lines, CSV, trainer_state.json, or event files of TensorBoard"


def detect(path: Path) -> Source | None:
    """The foreign source that a file or folder is; None for a trace of ds_parity's own.

    Raises:
        TraceError: it is missing, empty, binary, or none of the formats.
    """
    if path.is_dir():
        return _folder(path)
    with opened(path) as file:
        head = file.read(_HEAD)
    if "tfevents" in path.name or _EVENT in head[:64]:
        if is_pipe(path) or path.suffix == ".gz":
            raise TraceError(f"{path}: event files of TensorBoard are read from plain files: unpack it into a file")
        return events(path, [path])
    if not head.strip():
        raise TraceError(f"{path}: the file is empty: a trace has a header or a step")
    if b"\0" in head:
        raise TraceError(f"{path}: a binary file: give {_KINDS}")
    return _text(path, head)


def _folder(path: Path) -> Source:
    files = sorted(file for file in path.glob(PATTERN) if file.is_file())
    if files:
        return events(path, files)
    if (path / _STATE).is_file():
        return _whole(path / _STATE)
    below = sorted({str(file.parent) for file in path.rglob(PATTERN)})
    runs = f"; give the folder of one run: {', '.join(below[:10])}" if below else f": give {_KINDS}"
    raise TraceError(f"{path}: a directory without event files or {_STATE}{runs}")


def _text(path: Path, head: bytes) -> Source | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.startswith((b"{", b"[")):
        if path.suffix in (".json", ".jsonl", ".ndjson"):
            raise TraceError(
                f"{path}, line 1: {text[:30]!r} begins neither an object nor an array of JSON; if it "
                "is a table (CSV, or a log), give the file another ending, such as .csv"
            )
        return table(path)
    line = _first_line(path)
    try:
        first = parse(line)
    except (ValueError, RecursionError):
        return _whole(path) if b'"schema_version"' not in line else None
    if isinstance(first, dict) and "schema_version" in first:
        return None
    if (
        isinstance(first, dict)
        and first.keys() | {HYPOTHESES} == StepRecord.model_fields.keys()
        and isinstance(first["lr"], list)
    ):
        raise TraceError(
            f"{path}, line 1: a step of a ds_parity trace, and not its header: the file's first line is lost; put the "
            "first line of that trace, or of another of the same run, before it (with a key more, it is read as "
            "another trainer's)"
        )
    return json_lines(path) if isinstance(first, dict) and "log_history" not in first else _whole(path)


def _first_line(path: Path) -> bytes:
    with opened(path) as file:
        return next((line for line in file if line.strip()), b"")


def _whole(path: Path) -> Source:
    """A file that is one JSON value."""
    try:
        with opened(path) as file:
            value: Any = parse(file.read())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: no JSON, or cut short: {error}") from error
    if isinstance(value, dict) and "log_history" in value:
        return trainer_state(path, value)
    if isinstance(value, list):
        return Source(path, "json", partial(json_rows, path, "json", value, "item"))
    raise TraceError(f"{path}: an object of JSON without log_history: give {_KINDS}")
