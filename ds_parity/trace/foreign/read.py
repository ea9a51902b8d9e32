"""Reading a trace of whatever kind."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ds_parity.errors import ConfigError, TraceError
from ds_parity.trace.columns import TraceFile
from ds_parity.trace.foreign.build import build
from ds_parity.trace.foreign.detect import detect
from ds_parity.trace.foreign.field_names import Maps, parse_maps
from ds_parity.trace.opening import opened, same_pipe
from ds_parity.trace.reader import read_trace
from ds_parity.trace.records import Trace

_HEAD = 1 << 12


def read_any(path: str | Path, maps: Maps | None = None, mean_loss: bool = False) -> Trace:
    """A trace of ds_parity's own, or what another trainer left: its kind follows from what the file contains.

    Args:
        path: a file, or a folder with event files or a `trainer_state.json`.
        maps: field to columns (`parse_maps`), for foreign traces.
        mean_loss: a foreign trace's loss is the mean over the steps since the one logged before.

    Raises:
        TraceError: it can't be read, or the meaning of its columns can't be found out.
        ConfigError: tensorboard is needed and isn't installed.
    """
    return _read(Path(path), maps or {}, mean_loss)[0]


def _read(path: Path, maps: Maps, mean_loss: bool) -> tuple[Trace, bool]:
    """A trace, and whether it has columns to map."""
    try:
        source = detect(path)
        if source is not None:
            return build(source, maps, mean_loss), True
        trace = read_trace(path)
        return replace(trace, mean_loss=mean_loss and trace.header.foreign), False
    except OSError as error:
        raise TraceError(f"{path}: can't read the trace: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: it is no text in UTF-8: {error}") from error


def open_pair(
    reference: str | Path, candidate: str | Path, *, mean_loss: bool = False, **options: Iterable[str]
) -> tuple[Trace, Trace] | tuple[TraceFile, TraceFile]:
    """Two traces, with arguments as for `read_pair`; where both are ds_parity's own they are not held in memory.

    Raises:
        TraceError: as `read_pair`, but what is wrong with a step of a file is found when it is read.
        ConfigError: as `read_pair`.
    """
    if same_pipe(reference, candidate):
        raise TraceError(f"{candidate}: both traces are this one pipe, which can be read only once: give two")
    own = [] if mean_loss or any(options.values()) else [_own(Path(path)) for path in (reference, candidate)]
    if own and own[0] is not None and own[1] is not None:
        return own[0], own[1]
    return read_pair(reference, candidate, mean_loss=mean_loss, **options)


def _own(path: Path) -> TraceFile | None:
    """A trace of ds_parity's own; None for what is not one that can be read piece by piece."""
    try:
        with opened(path) as file:
            has_header = b'"schema_version"' in file.read(_HEAD)
        trace = TraceFile.open(path) if has_header else None
    except (OSError, TraceError):
        return None  # `read_pair` finds it again, and says of which kind it is not
    return None if trace is None or trace.header.foreign else trace


def read_pair(
    reference: str | Path,
    candidate: str | Path,
    *,
    both: Iterable[str] = (),
    left: Iterable[str] = (),
    right: Iterable[str] = (),
    mean_loss: bool = False,
) -> tuple[Trace, Trace]:
    """Two traces, with `name=column` options.

    Args:
        reference: as for `read_any`.
        candidate: as for `read_any`.
        both: for whichever of them is foreign.
        left: for the reference; they go before `both`.
        right: for the candidate, likewise.
        mean_loss: as for `read_any`, for whichever is foreign.

    Raises:
        TraceError: as `read_any`.
        ConfigError: as `read_any` and `parse_maps`; and for an option that no side takes.
    """
    shared, own = parse_maps(both), (parse_maps(left), parse_maps(right))
    paths = (Path(reference), Path(candidate))
    (a, one), (b, two) = (_read(path, {**shared, **maps}, mean_loss) for path, maps in zip(paths, own, strict=True))
    for path, maps, mapped in zip(paths, own, (one, two), strict=True):
        if maps and not mapped:
            raise ConfigError(
                f"{path} is a trace in ds_parity's own format: it has no column to map ({', '.join(maps)})"
            )
    if shared and not (one or two):
        raise ConfigError("--map is for the columns of foreign traces, but both traces are in ds_parity's own format")
    if mean_loss and not (a.header.foreign or b.header.foreign):
        raise ConfigError("--mean-loss is for foreign traces, but both traces are ds_parity's own")
    return a, b
