"""Whether the files of a checkpoint can be opened, before one of the ranks begins to load them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from ds_parity.engine.internals.checkpoints import rank_in_parts
from ds_parity.engine.ranks.agreement import in_short

_MODEL: Final = "*model_states.pt"
_WHOLE: Final = "mp_rank_"  # what all data-parallel ranks load
_OPTIMIZER: Final = "*_optim_states.pt"
_ZIP: Final = b"PK\x03\x04"


def damaged(engine: Any, folder: Path, options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the first file of a checkpoint that can't be opened; None where all can.

    What one rank alone finds while it loads leaves others waiting in DeepSpeed's load on ZeRO 3, and each engine with a
    part of the checkpoint. A file is opened, and its end is read: files that are empty, cut short, folders, or not
    there behind a link are found; one whose middle is damaged is not. Each rank looks at those that it loads, as hosts
    need not share the folder, and at its share of the others (the layers of a pipeline, the parameters of a universal
    checkpoint).

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        folder: of the checkpoint's tag.
        options: all other arguments of DeepSpeed's `load_checkpoint`, by their names.
    """
    files = [*folder.glob(_MODEL), *folder.glob("zero/*/*.pt")]
    if not any(one.parent == folder for one in files):
        return f"there is no {_MODEL}"  # killed behind its beginning, or no folder of a checkpoint
    alone = options["load_module_only"] or not options["load_optimizer_states"]
    if not alone or int(engine.zero_optimization_stage()) == 3:  # there the weights are in the optimizer's files
        files += folder.glob(_OPTIMIZER)
    files.sort()
    own, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = f"zero_pp_rank_{rank_in_parts(engine)}_"
    loaded = [one for one in files if mine in one.name or one.name.startswith(_WHOLE)]
    found = ((one, _wrong(one)) for one in dict.fromkeys([*loaded, *files[own::ranks]]))
    return next((f"{one.name} {wrong}" for one, wrong in found if wrong is not None), None)


def _wrong(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            head = file.read(len(_ZIP))
        if not head.strip(b"\0"):
            return "has zeros at its beginning" if head else "is empty"
        if head == _ZIP:  # torch's other format has no end that tells
            zipfile.ZipFile(path).close()
    except zipfile.BadZipFile:
        return "has no end, as a file that was cut short"
    except OSError as error:
        return f"can't be opened ({in_short(error)})"
    except Exception:  # what Python's own reader does not know, torch's may
        return None
    return None
