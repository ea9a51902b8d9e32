"""Writing a trace, one whole line at a time: a run that dies, or a full disk, leaves all finished steps."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ds_parity.errors import TraceError
from ds_parity.trace.records import Header, StepRecord


class TraceWriter:
    """Writes `header`, then a line a step. Use it as a context manager, or call `close`.

    Args:
        path: the file; missing folders are made, and a trace that stands there is overwritten.
        header: line 1, written at once.
        keep: bytes of the trace that stands there to go on behind, in place of a header (`end_of_step`).

    Raises:
        TraceError: from here and from every method: the file can't be made or written. The trace ends with the last
            line that was whole, and is closed.
    """

    def __init__(self, path: str | Path, header: Header, keep: int = 0) -> None:
        self.path = Path(path)
        with self._naming_path():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what a failed write leaves in a buffer would be written at some later time.
            self._file = self.path.open("r+b" if keep else "wb", buffering=0)
            if keep:
                self._file.truncate(keep)
                self._file.seek(keep)
        self._end = keep
        if not keep:
            self._line(header)

    def write(self, record: StepRecord) -> None:
        """Append a step; it is in the file when this returns."""
        if self._file.closed:
            raise TraceError(f"{self.path}: step {record.step} was written after the trace was closed")
        self._line(record)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        with self._naming_path():
            self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _line(self, record: Header | StepRecord) -> None:
        line = memoryview(record.model_dump_json().encode() + b"\n")
        with self._naming_path():
            left = line
            try:
                while left:  # a disk that fills up takes a part, and fails at the next
                    left = left[self._file.write(left) :]
            except OSError:
                self._take_back()
                raise
        self._end += len(line)

    def _take_back(self) -> None:
        # Cutting needs no space. A device or a pipe can't be cut.
        with suppress(OSError):
            self._file.truncate(self._end)
        with suppress(OSError):
            self._file.close()

    @contextmanager
    def _naming_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceError(f"{self.path}: can't write the trace: {error.strerror or error}") from error


def end_of_step(path: str | Path, step: int) -> int | None:
    """Where a trace goes on behind a step: the bytes of its header and of all steps up to `step`.

    What a run wrote after the checkpoint that it is resumed from lies behind it, a line cut short by its end too.

    Args:
        path: the trace.
        step: of the checkpoint; 0: none was taken.

    Returns:
        None where the file holds no trace, or one that ended before `step`. A trace without a step goes on anywhere.

    Raises:
        TraceError: the file can't be read.
    """
    end, last = 0, None
    try:
        for line in _lines(path):
            number = _whole(line).get("step" if end else "schema_version")
            if not isinstance(number, int) or (end and number > step):
                break
            end, last = end + len(line), number if end else None
    except OSError as error:
        raise TraceError(f"{path}: can't read the trace to go on with: {error.strerror or error}") from error
    return end if end and last in (None, step) else None


def _lines(path: str | Path) -> Iterator[bytes]:
    # A device or a pipe holds nothing, and may never end; a folder is an error.
    if Path(path).is_file() or Path(path).is_dir():
        with Path(path).open("rb") as file:
            yield from file


def _whole(line: bytes) -> dict[str, Any]:
    """Return what a whole line holds, nothing of one that is cut short."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
