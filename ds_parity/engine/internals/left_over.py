"""Files in a checkpoint's folder that its save did not write: a load or a conversion takes them for its own."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from ds_parity.engine.internals.surface import Engine

_FILE: Final = re.compile(r"(?:((?:bf16_)?zero_pp|expp)_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_ASIDE: Final = ".earlier"  # behind a dot: a conversion looks for names that begin as it does, and others that end so
_OF_EXPERTS: Final = "expp"  # optimizer's files of ranks that have experts, on ZeRO 0
_Kind = tuple[str | None, str, str]
"""How names begin (None: the file is no rank's), the part of the model, and what the file has."""

_SAVED: Final[dict[Path, Mapping[str, int]]] = {}
"""By folder: the files that engines of this process have saved there, and when each was changed (in ns)."""


def changed_at(folder: Path, names: Collection[str]) -> dict[str, int]:
    """Return when each file was changed (in ns), and 0 for one that a thread is still to write."""
    changed = {}
    for name in names:
        try:
            changed[name] = (folder / name).stat().st_mtime_ns
        except OSError:  # the others wait for what this rank says
            changed[name] = 0
    return changed


def remove_left_over(folder: Path, written: Mapping[str, int]) -> list[str]:
    """Remove the files that an earlier save under a tag has left, and return those that may be somebody else's.

    They are of ranks that this save has not, of fp32 where this one is in bf16 (or the reverse), or of another ZeRO
    stage, and are of no more use: the others were replaced. DeepSpeed takes them for parts of this save without an
    error. Its conversion cuts every part wrongly on ZeRO 3 where they are of more ranks (checkpoint/ds_to_universal.py,
    extract_zero_shards_stage3, 0.19.8; tools/deepspeed_faults/converted_with_left_over.py), and on ZeRO 1 to 3 it takes
    the optimizer's states in fp32 that lie beside those of a run in bf16, whose files have a name of their own. Of
    another stage, an engine of that stage loads them, and zero_to_fp32.py takes buffers from them.

    Args:
        folder: of the tag, which every rank has written its files into.
        written: names of the files that all ranks have written, and when each was changed (`changed_at`). A rank says
            it of its own: if each asked for those of all, the file system would be asked ranks * ranks times.

    Returns:
        Names of files that an engine which ds_parity knows nothing of has saved since this process began: those of
        another ZeRO stage, and what belongs to them.

    Raises:
        OSError: one can't be removed; all others are.
    """
    save = _Written(written)
    files = sorted(folder.iterdir())
    there = {file: match for file in files if (match := _FILE.fullmatch(file.name))}
    strays = {file for file, match in there.items() if save.are_of_another_stage(_kind(match))}
    before, errors = _SAVED.get(folder.resolve(), {}), list[OSError]()
    began = _began_by_the_clock_of(folder) if strays else 0.0
    others = {file for file in strays if not _may_go(file, before, began)}
    of_others = {there[file][3] for file in others}
    for file, match in there.items():
        if file in others or not (file in strays or save.have_replaced(_kind(match), _rank(match))):
            continue
        if match[3] in of_others and not _may_go(file, before, began):
            others.add(file)
            continue
        _remove(file, errors)
    for file in files:
        if file.suffix == _ASIDE and file.stem[0] == "." and _FILE.fullmatch(file.stem[1:]):
            _remove(file, errors)  # of a rank that this save has not
    _SAVED[folder.resolve()] = written
    if errors:
        raise errors[0]
    return sorted(file.name for file in others)


def _remove(file: Path, errors: list[OSError]) -> None:
    try:
        file.unlink(missing_ok=True)  # other ranks do the same
    except OSError as error:
        errors.append(error)


class Withdrawn:
    """This rank's file of the optimizer's states of an earlier save under a tag, put aside before any rank writes one.

    Once all ranks have done so, a run that is killed in its save leaves no states of the one save beside states of the
    other. A load tells them apart by the identity of each file, which DeepSpeed's conversion leaves out: it takes parts
    of the weights from each, without an error on ZeRO 3 (checkpoint/ds_to_universal.py, 0.19.8).

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        saving: the folder of all checkpoints, and the tag.
    """

    def __init__(self, engine: Engine, saving: tuple[str, str]) -> None:
        self._file: Path | None = None
        self._was_there = False  # what a killed save has put aside may be of another save than the others' files
        if getattr(engine.optimizer, "dp_process_group", None) is not None:
            self._file = Path(engine._get_zero_ckpt_name(*saving))
            with suppress(OSError):  # the save comes to the same, and says so
                if self._file.is_file():
                    self._file.replace(_aside(self._file))
                    self._was_there = True

    def remove(self) -> None:
        """Remove it: this rank writes, or another one has, so that it belongs to nothing."""
        if self._file is not None:
            with suppress(OSError):
                _aside(self._file).unlink(missing_ok=True)

    def put_back(self) -> None:
        """Put it back where it was: no rank has written a file."""
        if self._file is not None and self._was_there:
            with suppress(OSError):
                _aside(self._file).replace(self._file)


def _aside(file: Path) -> Path:
    return file.with_name(f".{file.name}{_ASIDE}")


class _Written:
    """What a save has written: of which kinds, and up to which rank.

    Ranks that hold another part of the model may save under the tag as well, and say nothing here.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._last: dict[_Kind, int] = {}
        for match in filter(None, map(_FILE.fullmatch, names)):
            kind = _kind(match)
            self._last[kind] = max(self._last.get(kind, 0), _rank(match))

    def _of(self, part: str, what: str) -> dict[str | None, int]:
        return {one[0]: rank for one, rank in self._last.items() if one[1:] == (part, what)}

    def are_of_another_stage(self, kind: _Kind) -> bool:
        prefix, part, what = kind
        models = self._of(part, "model")
        if what == "model":  # a file for each rank on ZeRO 3, and one for all on the others
            return bool(models) and all((one is None) != (prefix is None) for one in models)
        # ZeRO 0 has none, or those of experts.
        alike = [one for one in self._of(part, "optim") if (one == _OF_EXPERTS) == (prefix == _OF_EXPERTS)]
        return bool(models) and not alike

    def have_replaced(self, kind: _Kind, rank: int) -> bool:
        prefix, part, what = kind
        alike = self._of(part, what)
        return prefix is not None and bool(alike) and (prefix not in alike or rank > alike[prefix])


def _began_by_the_clock_of(folder: Path) -> float:
    """Return when this process began (in ns), by the clock that sets the times of files there: a server has its own."""
    # Which may be long before the first use of ds_parity, and behind its import where the process was forked.
    began: float = psutil.Process().create_time()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            ahead = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError:  # no file is left there (a quota of them): as if both clocks were one
        ahead = 0.0
    return (began + ahead) * 1e9


def _may_go(file: Path, before: Mapping[str, int], began: float) -> bool:
    try:
        changed = file.stat().st_mtime_ns
    except FileNotFoundError:  # another rank has removed it
        return True
    return changed == before.get(file.name) or changed < began


def _kind(match: re.Match[str]) -> _Kind:
    return match[1], match[3], match[4]


def _rank(match: re.Match[str]) -> int:
    return int(match[2] or 0)
