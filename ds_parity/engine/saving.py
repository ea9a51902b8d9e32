"""What ranks do together where they save a checkpoint: one tag, one identity, and `latest` when all have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import torch.distributed as dist

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.ranks.agreement import refuse_differing

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
    """

    save_dir: str
    tag: str
    names_latest: bool
    without_frozen: bool
    # Not by torch's or Python's random numbers, which are the loop's.
    identity: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def of(cls, engine: Engine, save_dir: str, tag: Any, *, names_latest: bool, without_frozen: bool) -> Saving:
        """Return it with the tag that DeepSpeed gives where none is given: by its count of steps."""
        named = f"global_step{engine.global_steps}" if tag is None else str(tag)
        return cls(save_dir, named, names_latest, without_frozen)


def agreed(gathered: Sequence[Saving]) -> str:
    """Return the identity of a save, the same on every rank.

    Args:
        gathered: of all ranks, in their order.

    Raises:
        RankDesyncError: on every rank, where ranks save under different tags, or otherwise.
    """
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
    return gathered[0].identity


def write(adapter: Adapter, saving: Saving, state: Mapping[str, Any]) -> Any:
    """Let DeepSpeed save, and name the checkpoint in `latest` once all ranks have written it; return what it returns.

    Args:
        adapter: of the engine, which may be a pipeline's.
        saving: what is saved, as all ranks have agreed.
        state: the client state.
    """
    # A decoupled checkpoint engine is still writing when it returns, so only it knows when `latest` may change.
    by_deepspeed = saving.names_latest and adapter.writes_latest_itself
    saved = adapter.engine.save_checkpoint(saving.save_dir, saving.tag, state, by_deepspeed, saving.without_frozen)
    if saving.names_latest and not by_deepspeed:
        name_latest(saving.save_dir, saving.tag)
    return saved


def name_latest(save_dir: str, tag: str) -> None:
    """Let `latest` name a checkpoint, on the first rank; every rank calls, behind DeepSpeed's save_checkpoint.

    DeepSpeed 0.19.8 writes it when the first rank has its own files, others may still be at theirs, and empties it
    first (tools/deepspeed_faults/latest_before_all_files.py). The barrier that all files wait for ends its
    save_checkpoint.
    """
    if dist.get_rank() == 0:
        latest = Path(save_dir) / "latest"
        # A rename changes the file at once; a run that is killed here finds the old name or the new one.
        beside = latest.with_name("latest.new")
        beside.write_text(tag)
        beside.replace(latest)
    dist.barrier()
