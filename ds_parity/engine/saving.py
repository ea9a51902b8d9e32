"""What ranks do together where they save a checkpoint: one tag, one identity, and `latest` when all have written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import torch.distributed as dist

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.checkpoints import going_on
from ds_parity.engine.internals.identity import marked
from ds_parity.engine.internals.left_over import Withdrawn, changed_at, remove_left_over
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.ranks.agreement import in_short, refuse_differing
from ds_parity.engine.writers import Writer
from ds_parity.errors import CheckpointError

_LOG: Final = logging.getLogger("ds_parity")
Gather = Callable[[Any], list[Any]]
KEY: Final = "ds_parity"
"""Under this name of the client state: that of the windows."""
IDENTITY: Final = "identity"
"""Under this name of the window's state: what tells one save from all others."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint as one rank saves it.

    Attributes:
        save_dir: as in DeepSpeed; hosts need not share it.
        tag: name of the checkpoint.
        names_latest: `latest` is to name the checkpoint.
        without_frozen: leave frozen parameters out.
        identity: what this rank proposes to tell this save from all others by.
        replaces: it would replace the checkpoint of another engine of this process.
    """

    save_dir: str
    tag: str
    names_latest: bool
    without_frozen: bool
    # Not by torch's or Python's random numbers, which are the loop's.
    identity: str = field(default_factory=lambda: uuid4().hex)
    replaces: bool = False

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return Path(self.save_dir) / self.tag

    @classmethod
    def of(
        cls, engine: Engine, writer: Writer, save_dir: str, tag: Any, *, names_latest: bool, without_frozen: bool
    ) -> Saving:
        """Return it with the tag that DeepSpeed gives where none is given: by its count of steps.

        Args:
            engine: a bare DeepSpeed engine, of a pipeline or not.
            writer: the engine as one that saves checkpoints.
            save_dir: as in DeepSpeed.
            tag: likewise.
            names_latest: `latest` is to name the checkpoint.
            without_frozen: leave frozen parameters out.
        """
        named = f"global_step{engine.global_steps}" if tag is None else str(tag)
        replaces = writer.replaces_another(save_dir, named)
        return cls(save_dir, named, names_latest, without_frozen, replaces=replaces)


def agreed(gathered: Sequence[Saving]) -> str:
    """Return the identity of a save, the same on every rank.

    Args:
        gathered: of all ranks, in their order.

    Raises:
        RankDesyncError: on every rank, where ranks save under different tags, or otherwise.
        CheckpointError: on every rank, where one gives an empty tag, or the tag of another engine's checkpoint.
    """
    for rank, one in enumerate(gathered):
        if why := _no_folder(one.tag):
            raise CheckpointError(
                f"save_checkpoint({one.save_dir!r}, tag={one.tag!r}): rank {rank} gives {why}. Nothing was written; "
                "give every checkpoint a name, or leave tag out for one by the count of steps"
            )
    asked = [
        {
            "tag": repr(one.tag),
            "save_latest": one.names_latest,
            "exclude_frozen_parameters": one.without_frozen,
        }
        for one in gathered
    ]
    refuse_differing(
        "save_checkpoint()",
        asked,
        "Each rank writes its part of one checkpoint, which would be whole under no tag. Nothing was written; give the "
        "same tag, save_latest and exclude_frozen_parameters on every rank (a tag by time or by a listing: broadcast "
        "that of the first rank)",
    )
    if any(one.replaces for one in gathered):
        raise CheckpointError(
            f"save_checkpoint({gathered[0].save_dir!r}, tag={gathered[0].tag!r}): another engine of this process has "
            "saved its checkpoint there, which this one would replace. Nothing was written; give each engine a folder "
            "of its own, so that each has its own file latest, too, or destroy() the other one if its checkpoint may go"
        )
    return gathered[0].identity


def _no_folder(tag: str) -> str:
    """Return why a tag names no folder of its own below the one of all checkpoints, "" where it does."""
    path = Path(tag)
    if not tag.strip() or not path.parts:
        return (
            "an empty tag, so that the files would lie beside the folders of the checkpoints, and not in one of their "
            "own"
        )
    if path.is_absolute() or ".." in path.parts:
        return "a tag that leads out of that folder"
    if tag != tag.strip():
        return "a tag that begins or ends with blanks, which DeepSpeed strips where it reads the file latest"
    return ""


def write(adapter: Adapter, saving: Saving, state: Mapping[str, Any], gather: Gather) -> Any:
    """Let DeepSpeed save, and name the checkpoint in `latest` once all ranks have written it; return what it returns.

    Args:
        adapter: of the engine, which may be a pipeline's.
        saving: what is saved, as all ranks have agreed.
        state: the client state, with the window's, which has the identity of the save.
        gather: gathers a value of every rank that has saved.

    Raises:
        CheckpointError: on every rank, where one could not write its files.
    """
    # A decoupled checkpoint engine is still writing when it returns, so only it knows when `latest` may change.
    by_deepspeed = saving.names_latest and adapter.writes_latest_itself
    identity = state[KEY][IDENTITY]
    earlier = Withdrawn(adapter.engine, (saving.save_dir, saving.tag))
    gather(None)  # behind this no rank has a file of an earlier save
    with marked(adapter.engine, identity, earlier.remove) as names, going_on(adapter.engine) as errors:
        saved = adapter.engine.save_checkpoint(saving.save_dir, saving.tag, state, by_deepspeed, saving.without_frozen)
    everywhere = gather((_said(errors), changed_at(saving.folder, sorted(names))))
    if any(there for _, there in everywhere):
        earlier.remove()
    else:
        earlier.put_back()
    _refuse_a_part(saving, "its files", errors, [said for said, _ in everywhere])
    _remove_left_over(saving, {name: changed for _, there in everywhere for name, changed in there.items()})
    if saving.names_latest and not by_deepspeed:
        name_latest(saving, gather)
    return saved


def _remove_left_over(saving: Saving, written: Mapping[str, int]) -> None:
    try:
        others = remove_left_over(saving.folder, written)
    except OSError as error:
        _LOG.warning(
            "a file that an earlier save under the tag %r has left could not be removed (%s): remove the files of "
            "mp_rank_* in %s that are older than this save before it is loaded or converted",
            saving.tag,
            in_short(error),
            saving.folder,
        )
        return
    if others and dist.get_rank() == 0:
        _LOG.warning(
            "%s was written since this process began, by another engine than ds_parity's, on another ZeRO stage: it is "
            "left, but a conversion takes it for a part of this save; give each engine a folder of its own",
            saving.folder / others[0],
        )


def _said(errors: Sequence[Exception]) -> str | None:
    return in_short(errors[0]) if errors else None


def _refuse_a_part(saving: Saving, what: str, errors: Sequence[Exception], gathered: Sequence[str | None]) -> None:
    failed = [f"rank {rank} could not write {what} ({said})" for rank, said in enumerate(gathered) if said is not None]
    if failed:
        raise CheckpointError(
            f"save_checkpoint({saving.save_dir!r}, tag={saving.tag!r}): {'; '.join(failed[:3])}. The checkpoint is not "
            "whole, and the file latest names what it named before. Mend what that says (a full disk, a folder that "
            "can't be written, a client state that can't be pickled), and save again; the engine is as it was"
        ) from (errors[0] if errors else None)


def name_latest(saving: Saving, gather: Gather) -> None:
    """Let `latest` name a checkpoint, on the first rank; every rank calls, behind DeepSpeed's save_checkpoint.

    DeepSpeed 0.19.8 writes it when the first rank has its own files, others may still be at theirs, and empties it
    first (tools/deepspeed_faults/latest_before_all_files.py). The barrier that all files wait for ends its
    save_checkpoint.

    Args:
        saving: what was saved.
        gather: gathers a value of every rank that has saved.

    Raises:
        CheckpointError: on every rank, where the first one could not write the file.
    """
    errors: list[Exception] = []
    if dist.get_rank() == 0:
        # The others come to hear of it, whatever is raised: a locale may have no letters for the tag.
        try:
            latest = Path(saving.save_dir) / "latest"
            # A rename changes the file at once; a run that is killed here finds the old name or the new one.
            beside = latest.with_name("latest.new")
            beside.write_text(saving.tag)
            beside.replace(latest)
        except Exception as error:
            errors.append(error)
    _refuse_a_part(saving, "the file latest", errors, gather(_said(errors)))
