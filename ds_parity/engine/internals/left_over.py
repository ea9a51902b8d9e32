"""Files in a checkpoint's folder that its save did not write: a load or a conversion takes them for its own."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_FILE: Final = re.compile(r"(?:((?:bf16_)?)zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_Kind = tuple[str | None, str, str]
"""What stands before `zero_pp_rank_` (None: the file is no rank's), the part of the model, and what the file has."""

_BEGAN: Final = time.time()
_SAVED: Final[dict[Path, set[_Kind]]] = {}
"""The kinds of files that engines of this process have saved in a folder."""


def remove_left_over(folder: Path, names: Collection[str]) -> list[str]:
    """Remove the files that an earlier save under a tag has left, and return those that may be somebody else's.

    They are of ranks that this save has not, of fp32 where this one is in bf16 (or the reverse), or of another ZeRO
    stage, and are of no more use: the others were replaced. DeepSpeed takes them for parts of this save without an
    error. Its conversion cuts every part wrongly on ZeRO 3 where they are of more ranks (checkpoint/ds_to_universal.py,
    extract_zero_shards_stage3, 0.19.8; tools/deepspeed_faults/converted_with_left_over.py), and on ZeRO 1 to 3 it takes
    the optimizer's states in fp32 that lie beside those of a run in bf16, whose files have a name of their own. Of
    another stage, an engine of that stage loads them, and zero_to_fp32.py takes buffers from them.

    Args:
        folder: of the tag, which every rank has written its files into.
        names: of the files that all ranks have written.

    Returns:
        Names of files of another ZeRO stage that were written since this process began, and not by ds_parity.

    Raises:
        OSError: one can't be removed; all others are.
    """
    last: dict[_Kind, int] = {}
    for match in filter(None, map(_FILE.fullmatch, names)):
        kind = _kind(match)
        last[kind] = max(last.get(kind, 0), _rank(match))
    before, errors, others = _SAVED.setdefault(folder.resolve(), set()), [], []
    for file, match in _matching(folder):
        kind = _kind(match)
        try:
            if _of_another_stage(kind, last):
                # An engine that ds_parity knows nothing of may have saved it here just now.
                if kind in before or file.stat().st_mtime < _BEGAN:
                    file.unlink()
                else:
                    others.append(file.name)
            elif _replaced(kind, _rank(match), last):
                file.unlink()
        except FileNotFoundError:  # other ranks do the same
            pass
        except OSError as error:
            errors.append(error)
    before.difference_update({kind for kind in before if _of_another_stage(kind, last)})
    before.update(last)
    if errors:
        raise errors[0]
    return sorted(others)


def _matching(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for file in folder.iterdir():
        if match := _FILE.fullmatch(file.name):
            yield file, match


def _kind(match: re.Match[str]) -> _Kind:
    return match[1], match[3], match[4]


def _rank(match: re.Match[str]) -> int:
    return int(match[2] or 0)


def _of_another_stage(kind: _Kind, last: Collection[_Kind]) -> bool:
    prefix, part, what = kind
    # Ranks that hold another part of the model may save under the tag as well, and say nothing here.
    models = [one for one in last if one[1:] == (part, "model")]
    if what == "model":  # a file for each rank on ZeRO 3, and one for all on the others
        return bool(models) and all((one[0] is None) != (prefix is None) for one in models)
    return bool(models) and all(one[1:] != (part, "optim") for one in last)  # ZeRO 0 has none


def _replaced(kind: _Kind, rank: int, last: dict[_Kind, int]) -> bool:
    prefix, *of = kind
    found = [(one[0], number) for one, number in last.items() if list(one[1:]) == of]
    return prefix is not None and bool(found) and all(one != prefix or rank > number for one, number in found)
