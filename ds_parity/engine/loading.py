"""What ranks say to each other around a load: that they ask for one checkpoint, and have loaded the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ds_parity.engine.files_on_disk import damaged
from ds_parity.engine.internals.identity import Files, renamed
from ds_parity.engine.internals.universal import incomplete
from ds_parity.engine.ranks.agreement import in_short, refuse_differing
from ds_parity.engine.saving import IDENTITY
from ds_parity.engine.unloadable import folder_of, tag_of
from ds_parity.errors import CheckpointError

_FOLDER: Final = "folder"
_UNREAD: Final = "unread"
_RENAMED: Final = "renamed"
_BROKEN: Final = "broken"
_OF_EACH: Final = {_FOLDER, _UNREAD, _BROKEN}
_OF_SAVING: Final = (
    "its saving broke off, or files were lost or damaged. Nothing was loaded; load the one before it, by its tag"
)
_OF_CONVERSION: Final = (
    "its conversion broke off, files were lost, or another model, or another set of trained parameters, was saved, or "
    "a pipeline that had not taken a step yet. Nothing was loaded; convert it anew, into a folder of its own, and load "
    "it into the model that saved it (of a pipeline, one that was saved behind a step)"
)
_WAY_OUT: Final = (
    "Training would go on from a mixture of them. Load one checkpoint on every rank, with the same arguments (a tag "
    "by a listing: broadcast that of the first rank), and where hosts do not share the folder, copy one checkpoint "
    "and its file latest to all of them"
)


def asked(
    engine: Any,
    load_dir: str,
    tag: Any,
    options: Mapping[str, Any],
    stepped: Iterable[Any] = (),
    refused: Callable[[Path], str | None] = lambda folder: None,
) -> dict[str, Any]:
    """Return what this rank is about to load, for all ranks to compare before one of them loads.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        load_dir: as in DeepSpeed; hosts need not share it.
        tag: likewise; None for that of the file `latest`.
        options: all other arguments of DeepSpeed's `load_checkpoint`, by their names.
        stepped: the parameters of which a universal checkpoint must have a folder, by their names.
        refused: of a checkpoint's folder, returns why it can't be loaded, with the way out; None: it can.
    """
    universal = bool(engine.load_universal_checkpoint())
    flags = {name: bool(value) for name, value in options.items() if name != "custom_load_fn"}
    custom = options["custom_load_fn"] is not None

    def broken(folder: Path) -> str | None:
        lacking = incomplete(engine, folder, stepped) if universal else None
        why = damaged(engine, folder, options) if lacking is None else f"it has no {lacking}"
        if why is None:
            why = refused(folder)
            return why and f"can't be loaded here: {why}"
        return f"is not whole: {why}, as where {_OF_CONVERSION if universal else _OF_SAVING}"

    found = _found(load_dir, tag, broken, universal=universal)
    return {**found, **flags, "custom_load_fn": "one" if custom else "none"}


def _found(load_dir: str, tag: Any, broken: Callable[[Path], str | None], *, universal: bool) -> dict[str, Any]:
    # The other ranks come to compare, whatever this one finds. Path.is_dir raises where it may not look (EACCES), and
    # where a shared folder is gone (ESTALE).
    named, unread, why, found = None, None, None, False
    try:
        named = tag_of(load_dir, tag, universal=universal)
        if tag is None and named == "":
            unread = "the file is empty"
        elif tag is None and named is not None and "\0" in named:
            unread = "the file has a NUL byte, of which no folder can have the name"
        folder = None if named is None else folder_of(load_dir, named)
        found = folder is not None and folder.is_dir()
        why = broken(folder) if folder is not None and found else None
    except Exception as error:  # the other ranks wait in the comparison for whatever it is
        unread = in_short(error)
    return {"tag": repr(named), _FOLDER: found, _UNREAD: unread, _BROKEN: why}


def refuse_unlike_loads(load_dir: str, gathered: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether there is a folder to load; raise where ranks are about to load different things.

    Args:
        load_dir: for the message.
        gathered: what `asked` has returned on all ranks, in their order.

    Raises:
        RankDesyncError: on every rank, where tags or options differ.
        CheckpointError: on every rank, where one may not look for the tag's folder, or some ranks find it and others
            do not, or a file of the checkpoint can't be opened, or a universal one lacks a file.
    """
    where = f"load_checkpoint({load_dir!r})"
    unread = [f"rank {rank} ({one[_UNREAD]})" for rank, one in enumerate(gathered) if one[_UNREAD] is not None]
    if unread:
        raise CheckpointError(
            f"{where}: the folder, or its file that names the latest checkpoint, can't be read on "
            f"{', '.join(unread[:3])}. Nothing was loaded; mend what that says (rights, a shared folder that is gone), "
            "and load again"
        )
    alike = [{key: value for key, value in one.items() if key not in _OF_EACH} for one in gathered]
    refuse_differing(where, alike, f"{_WAY_OUT}. Nothing was loaded")
    found = [rank for rank, one in enumerate(gathered) if one[_FOLDER]]
    lost = sorted(set(range(len(gathered))) - set(found))
    if found and lost:
        raise CheckpointError(
            f"{where}: rank {lost[0]} finds no folder of the tag {gathered[0]['tag']} there, and rank {found[0]} finds "
            "one. Nothing was loaded; give the same folder on every rank, and where hosts do not share it, copy the "
            "checkpoint to all of them"
        )
    for rank, one in enumerate(gathered):
        if one[_BROKEN] is not None:
            raise CheckpointError(f"{where}, on rank {rank}: the checkpoint {one['tag']} {one[_BROKEN]}")
    return bool(found)


def loaded(engine: Any, state: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """Return what tells which checkpoint this rank has loaded, for all ranks to compare.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not, that has loaded it.
        state: what the checkpoint has of the window; without an identity where a release of before, or bare DeepSpeed,
            saved it.
        files: what the files say that were loaded.
    """
    saves = tuple(sorted({*files.saves, state[IDENTITY]} if IDENTITY in state else files.saves))
    said = {"checkpoint": saves or ("one without an identity",), "global_steps": int(engine.global_steps)}
    return {**said, _RENAMED: files.renamed}


def refuse_mixture(load_dir: str, gathered: Sequence[Mapping[str, Any]]) -> None:
    """Raise where ranks have loaded different checkpoints of one tag.

    Args:
        load_dir: for the message.
        gathered: what `loaded` has returned on all ranks, in their order.

    Raises:
        CheckpointError: on every rank, where one has loaded files of several saves, or one under another's name.
        RankDesyncError: on every rank, where ranks have loaded different ones.
    """
    where = f"load_checkpoint({load_dir!r})"
    mixed = [rank for rank, one in enumerate(gathered) if len(one["checkpoint"]) > 1]
    if mixed:
        raise CheckpointError(
            f"{where}: rank {mixed[0]} has loaded files of {len(gathered[mixed[0]]['checkpoint'])} saves from the "
            "folder of one tag: a save under a tag that was there was killed before all files were written, or files "
            "of another folder were copied into it. What was loaded is a mixture of them. Load another tag, and give "
            "each checkpoint a tag of its own; loading ends half way, so start a new engine"
        )
    for rank, one in enumerate(gathered):
        for name, saved_as in sorted(one[_RENAMED].items()):
            raise CheckpointError(f"{where}, on rank {rank}: {renamed(name, saved_as)}")
    rule = f"These are several saves under one tag. {_WAY_OUT}. Loading ends half way, so start a new engine"
    alike = [{key: value for key, value in one.items() if key != _RENAMED} for one in gathered]
    refuse_differing(where, alike, rule)
