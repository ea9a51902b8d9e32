"""Writing a trace, one whole line at a time: a run that dies, or a disk that fills up, leaves every finished step behind."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from ds_parity.errors import TraceError
from ds_parity.trace.records import Header, StepRecord


class TraceWriter:
    """Writes `header`, then a line a step. Use it as a context manager, or call `close`.

    Args:
        path: the file; missing folders are made, and a trace that stands there is overwritten.
        header: line 1, written at once.

    Raises:
        TraceError: from here and from every method: the file can't be made or written. The trace ends with the last line
            that was whole, and is closed.
    """

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = Path(path)
        with self._naming_path():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb", buffering=0)  # a buffer would hold the half line that a full disk left
        self._whole = 0
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
        line = record.model_dump_json().encode() + b"\n"
        with self._naming_path():
            try:
                left = memoryview(line)
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                self._end_before_half_line()
                raise
        self._whole += len(line)

    def _end_before_half_line(self) -> None:
        # Cutting needs no space. A device or a pipe can't be cut.
        with suppress(OSError):
            self._file.truncate(self._whole)
        with suppress(OSError):
            self._file.close()

    @contextmanager
    def _naming_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceError(f"{self.path}: can't write the trace: {error.strerror or error}") from error
