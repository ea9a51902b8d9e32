"""Writing a trace, one whole line at a time: a run that dies leaves every finished step behind."""

from collections.abc import Iterator
from contextlib import contextmanager
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
        TraceError: from here and from every method: the file can't be made or written.
    """

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = Path(path)
        with self._naming_path():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
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
        with self._naming_path():
            self._file.write(record.model_dump_json().encode() + b"\n")
            self._file.flush()

    @contextmanager
    def _naming_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceError(f"{self.path}: can't write the trace: {error.strerror or error}") from error
