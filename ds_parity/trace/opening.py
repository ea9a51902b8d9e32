"""Opening what a trace lies in: a file, a file that gzip has packed, or a pipe, which can be read only once."""

from __future__ import annotations

import gzip
import io
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from ds_parity.errors import TraceError

_GZIP = b"\x1f\x8b"
_AT_ONCE = 1 << 20

# What came through pipes, by the path that each was given by. A comparison reads a trace several times (for the scale
# of its numbers, then step by step), and a pipe only once: it is copied to the disk as it comes, and never to memory.
_COPIES: dict[Path, Any] = {}


@contextmanager
def opened(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a trace for reading bytes, from its beginning with every call, and unpack what gzip has packed.

    Raises:
        OSError: it can't be opened or read.
        TraceError: a pipe can't be copied; or inside, where the packed data end too early or are broken.
    """
    path = Path(path)
    with _raw(path) as file:
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        if not packed:
            yield file
            return
        with _naming(path), gzip.GzipFile(fileobj=file) as unpacked:
            yield cast(IO[bytes], unpacked)


@contextmanager
def opened_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """Open the same as text in UTF-8, with or without a byte order mark, and line ends as they are."""
    with opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        yield text
        with suppress(ValueError):
            text.detach()


def is_pipe(path: str | Path) -> bool:
    """Whether a path can be read only once: a pipe, a socket or a terminal."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode))


def same_pipe(one: str | Path, other: str | Path) -> bool:
    """Whether two paths are one and the same pipe."""
    return is_pipe(one) and is_pipe(other) and Path(one).samefile(other)


def _raw(path: Path) -> IO[bytes]:
    if path not in _COPIES and is_pipe(path):
        _COPIES[path] = _copied(path)
    copy = _COPIES.get(path)
    if isinstance(copy, TraceError):  # what the pipe had is gone: whoever opens it once more is told so, too
        raise copy
    return Path(path if copy is None else copy.name).open("rb")


def _copied(path: Path) -> Any:
    with path.open("rb") as pipe:  # that it can't be opened has nothing to do with where the copy goes
        return _copied_to_disk(path, pipe)


def _copied_to_disk(path: Path, pipe: IO[bytes]) -> Any:
    # It is deleted when the process ends.
    copy = tempfile.NamedTemporaryFile(prefix="ds_parity_")  # noqa: SIM115
    try:
        start = pipe.read(_AT_ONCE)
        copy.write(start)
        # What is no text has no end where it comes from a device, such as /dev/zero; its start tells what it is not.
        if b"\0" not in start or start.startswith(_GZIP):
            shutil.copyfileobj(pipe, copy, _AT_ONCE)
        copy.flush()
    except OSError as error:
        with suppress(OSError):
            copy.close()
        return TraceError(
            f"{path}: a pipe is copied to {tempfile.gettempdir()} as it comes, and that has failed "
            f"({error.strerror or error}): set TMPDIR to a folder with more room, or give the trace as a file"
        )
    return copy


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise TraceError(
            f"{path}: the gzip data are cut short: the file was not written or copied to its end; copy it again, or "
            "unpack what there is (gzip -dc) and compare that"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: the gzip data are broken ({error}): copy the file again") from error
