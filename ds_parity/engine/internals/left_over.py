"""Files in a checkpoint's folder that its save did not write: a conversion takes them for its own."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

_OF_RANK: Final = re.compile(r"((?:bf16_)?)zero_pp_rank_(\d+)_(mp_rank_\d+_(?:model|optim)_states\.pt)")


def remove_left_over(folder: Path, names: Collection[str]) -> None:
    """Remove the files that an earlier save under a tag has left: of ranks that this one has not, or of bf16 or fp32.

    They are of no more use: the others were replaced. DeepSpeed's conversion takes them for parts of this save without
    an error: on ZeRO 3 it cuts every part wrongly where they are of more ranks (checkpoint/ds_to_universal.py,
    extract_zero_shards_stage3, 0.19.8; tools/deepspeed_faults/converted_with_left_over.py), and on ZeRO 1 to 3 it takes
    the optimizer's states in fp32 that lie beside those of a run in bf16, whose files have a name of their own.

    Args:
        folder: of the tag, which every rank has written its files into.
        names: of the files that all ranks have written.

    Raises:
        OSError: one can't be removed; all others are.
    """
    last: dict[str, tuple[str, int]] = {}
    for one in filter(None, map(_OF_RANK.fullmatch, names)):
        last[one[3]] = max(last.get(one[3], (one[1], 0)), (one[1], int(one[2])))
    errors = []
    for file in folder.iterdir():
        match = _OF_RANK.fullmatch(file.name)
        # Ranks that hold another part of the model may save under the tag as well, and say nothing here.
        if match is None or match[3] not in last:
            continue
        precision, rank = last[match[3]]
        if match[1] != precision or int(match[2]) > rank:
            try:
                file.unlink(missing_ok=True)  # other ranks do the same
            except OSError as error:
                errors.append(error)
    if errors:
        raise errors[0]
