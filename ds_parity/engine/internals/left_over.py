"""Files in a checkpoint's folder of ranks that its save did not have: a conversion takes them for its own."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

_OF_RANK: Final = re.compile(r"((?:bf16_)?zero_pp_rank_)(\d+)_(mp_rank_\d+_(?:model|optim)_states\.pt)")


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
    last: dict[tuple[str, str], float] = {}
    for one in filter(None, map(_OF_RANK.fullmatch, names)):
        last[_series(one)] = max(last.get(_series(one), 0), int(one[2]))
    for file in folder.iterdir():
        match = _OF_RANK.fullmatch(file.name)
        # Ranks that hold another part of the model may save under the tag as well, and say nothing here.
        if match is not None and int(match[2]) > last.get(_series(match), math.inf):
            file.unlink(missing_ok=True)  # other ranks do the same


def _series(match: re.Match[str]) -> tuple[str, str]:
    """What the names of one kind of file have in common over ranks."""
    return match[1], match[3]
