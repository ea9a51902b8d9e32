"""Event files of TensorBoard, through its own reader. A tag is a column."""

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ds_parity.errors import ConfigError, TraceError
from ds_parity.trace.foreign.source import Source, SourceRow

PATTERN = "*tfevents*"
_FRAME = struct.Struct("<QI")  # the length of a record and its checksum; after the record comes another checksum
_LENGTH, _CHECKSUM = 8, 4


def events(path: Path, files: list[Path]) -> Source:
    """The event files of one run; scalars are in single precision.

    Raises:
        ConfigError: tensorboard isn't installed.
    """
    try:
        import tensorboard.backend.event_processing.event_file_loader  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading event files takes the package tensorboard, which isn't installed: "
            "pip install 'ds_parity[foreign]'"
        ) from error
    return Source(path, "tensorboard", partial(_rows, files), step="step", single=True)


def _rows(files: list[Path]) -> Iterator[SourceRow]:
    for path in files:
        _require_whole(path)
        for number, event in enumerate(_events(path), start=1):
            scalars = {value.tag: text for value in event.summary.value if (text := _scalar(path, value)) is not None}
            if scalars:
                yield SourceRow(f"event {number} of {path.name}", {**scalars, "step": str(event.step)})


def _events(path: Path) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    read, kept = 0, _records(path)
    try:
        for event in EventFileLoader(str(path)).Load():
            read += 1
            yield event
    except (DecodeError, ValueError, RuntimeError) as error:
        raise TraceError(f"{path}, event {read + 1}: it can't be read: {error}") from error
    if read != kept:  # the loader ends in silence at a record whose checksum is wrong
        raise TraceError(f"{path}, event {read + 1}: damaged: {read} of its {kept} events can be read")


def _scalar(path: Path, value: Any) -> str | None:
    """A scalar in the fewest digits that tell it from its neighbours in single precision; None for anything else."""
    from tensorboard.util import tensor_util

    plugin = value.metadata.plugin_data.plugin_name
    if plugin not in ("", "scalars") or not value.HasField("tensor"):
        return None
    number = tensor_util.make_ndarray(value.tensor)
    return str(number.reshape(())) if number.size == 1 and number.dtype.kind in "fiu" else None


def _require_whole(path: Path) -> None:
    if _records(path) < 0:
        raise TraceError(f"{path}: cut short: its writer was stopped inside a record")


def _records(path: Path) -> int:
    """How many records a file frames; -1 where it ends inside one.

    Raises:
        TraceError: the length of the last record is damaged: it doesn't have the checksum that stands behind it.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    size, at, count, head = path.stat().st_size, 0, 0, b""
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            head = file.read(_FRAME.size)
            if len(head) < _FRAME.size:
                return -1
            at += _FRAME.size + int(_FRAME.unpack(head)[0]) + _CHECKSUM
            count += 1
    if at == size:
        return count
    if len(head) == _FRAME.size and masked_crc32c(head[:_LENGTH]) != _FRAME.unpack(head)[1]:
        raise TraceError(f"{path}, event {count}: damaged: the checksum of its length does not fit")
    return -1
