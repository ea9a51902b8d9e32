"""Files in a checkpoint's folder of ranks that its save did not have: a conversion takes them for its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ds_parity.engine.internals.checkpoints import saved_in_parts
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import CheckpointError

_OF_RANK: Final = re.compile(r"((?:bf16_)?zero_pp_rank_)(\d+)_(mp_rank_\d+_(?:model|optim)_states\.pt)")


@contextmanager
def written(engine: Any) -> Iterator[set[str]]:
    """Return a context, and the names of the files that DeepSpeed saves inside.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
    """
    names: set[str] = set()

    def noting(save: Callable[..., Any]) -> Callable[..., Any]:
        def saved(state_dict: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            names.add(Path(path).name)
            return save(state_dict, path, *args, **kwargs)

        return saved

    with wrapped(engine.checkpoint_engine, "save", noting):
        yield names


def remove_left_over(folder: Path, names: Collection[str]) -> None:
    """Remove the files of ranks that an earlier save under a tag had, and this one has not.

    They are of no more use: those of the other ranks were replaced. On ZeRO 3 DeepSpeed's conversion counts them, and
    cuts every part wrongly, without an error (checkpoint/ds_to_universal.py, extract_zero_shards_stage3, 0.19.8;
    tools/deepspeed_faults/converted_with_left_over.py).

    Args:
        folder: of the tag, which every rank has written its files into.
        names: of the files that all ranks have written.

    Raises:
        OSError: one can't be removed.
    """
    written_by = {_series(match): 0 for name in names if (match := _OF_RANK.fullmatch(name))}
    for match in filter(None, map(_OF_RANK.fullmatch, names)):
        written_by[_series(match)] = max(written_by[_series(match)], int(match[2]))
    for file in folder.iterdir():
        match = _OF_RANK.fullmatch(file.name)
        # Ranks that hold another part of the model may save under the tag as well, and say nothing here.
        if match is not None and int(match[2]) > written_by.get(_series(match), int(match[2])):
            file.unlink(missing_ok=True)  # other ranks do the same


def _series(match: re.Match[str]) -> tuple[str, str]:
    """What the names of one kind of file have in common over ranks."""
    return match[1], match[3]


def refuse_left_over(engine: Engine, path: str) -> None:
    """Raise CheckpointError where a universal checkpoint was made of the files of more ranks than have saved it.

    Args:
        engine: that has loaded it.
        path: of the model's file, as DeepSpeed's load returns it.
    """
    file, saved = Path(path), saved_in_parts(engine)
    match = _OF_RANK.fullmatch(file.name)  # the model has a file for each rank on ZeRO 3 alone
    if match is None or saved is None or not engine.load_universal_checkpoint():
        return
    others = map(_OF_RANK.fullmatch, (one.name for one in file.parent.iterdir()))
    there = sum(1 for one in others if one is not None and _series(one) == _series(match))
    if there > saved:
        raise CheckpointError(
            f"the universal checkpoint in {file.parent} has the files of {there} ranks, and {saved} have saved it. If "
            "those of an earlier save under its tag were converted with it, DeepSpeed has cut all parts wrongly; if "
            "they are of an earlier conversion, all is right. Remove zero_pp_rank_* of ranks from "
            f"{saved} on from the folder that was converted, and convert it again into an empty folder. Loading ends "
            "half way, so start a new engine"
        )
