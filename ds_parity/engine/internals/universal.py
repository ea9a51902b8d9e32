"""Loads what a universal checkpoint holds of a model beside its trained parameters: frozen weights and buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import CheckpointError

_OF_RANK: Final = re.compile(r"zero_pp_rank_(\d+)_(mp_rank_\d+_model_states\.pt)")


def load_untrained(engine: Engine, path: str, *, strict: bool) -> None:
    """Give a model the buffers and frozen weights of a universal checkpoint, of which DeepSpeed loads none.

    Its load reads the parameters that an optimizer has, and passes over the model's own state (runtime/engine.py,
    _load_checkpoint, 0.19.8; tools/deepspeed_faults/universal_without_buffers.py). Both are in the files of the model,
    which the conversion copies. On ZeRO 3 each rank's file has a part of the frozen weights. All ranks call it.

    Args:
        engine: that has loaded the checkpoint, inside `any_shape_is_gathered`.
        path: of the model's file, as DeepSpeed's load returns it.
        strict: what either side lacks is an error; else it stays as it is.

    Raises:
        CheckpointError: a frozen weight or a buffer is there on one side alone, or has another shape.
    """
    trained = {name for name, p in engine.module.named_parameters(remove_duplicate=False) if p.requires_grad}
    wanted = [name for name in engine.module.state_dict() if name not in trained]
    if not wanted:
        return
    there = _saved(path)
    held = {name: there[name] for name in wanted if name in there}
    if strict and len(held) < len(wanted):
        absent = [name for name in wanted if name not in held]
        others = f", and {len(absent) - 1} more" if absent[1:] else ""
        raise CheckpointError(
            f"the universal checkpoint has no {absent[0]}{others}, a buffer or a frozen weight of this model: "
            "load it into the model that was saved, or give load_module_strict=False to keep what this engine has"
        )
    partitioned = {name: p for name, p in engine.module.named_parameters(remove_duplicate=False) if hasattr(p, "ds_id")}
    _refuse_other_shapes(engine, held, partitioned)
    with GatheredParameters([partitioned[name] for name in held if name in partitioned], modifier_rank=0):
        # What a rank writes into a gathered parameter is the first one's anyway.
        engine.module.load_state_dict(held, strict=False)


def _refuse_other_shapes(engine: Engine, held: Mapping[str, Any], partitioned: Mapping[str, Any]) -> None:
    own = engine.module.state_dict()
    for name, value in held.items():
        if not isinstance(value, torch.Tensor):
            continue
        shape = partitioned[name].ds_shape if name in partitioned else own[name].shape
        if tuple(shape) != tuple(value.shape):
            raise CheckpointError(
                f"the universal checkpoint's {name} has the shape {tuple(value.shape)}, and this model's has "
                f"{tuple(shape)}: load it into the model that was saved"
            )


def _saved(path: str) -> dict[str, Any]:
    """The model's state in its file, or files: whole tensors by name; of ZeRO 3 frozen weights and buffers alone."""
    file = Path(path)
    first = _read(file)
    found: dict[str, Any] = dict(first["module"])
    of_rank = _OF_RANK.fullmatch(file.name)
    if of_rank is None:
        return found
    buffers = set(first.get("buffer_names") or ())
    shapes = first.get("frozen_param_shapes") or {}
    parts = [_read(one).get("frozen_param_fragments") or {} for one in _of_all_ranks(file, of_rank[2])]
    frozen = dict(_whole(shapes, parts))
    return {name: value for name, value in found.items() if name in buffers or not isinstance(value, torch.Tensor)} | (
        frozen
    )


def _of_all_ranks(file: Path, ending: str) -> Iterable[Path]:
    found = [(match, one) for one in file.parent.iterdir() if (match := _OF_RANK.fullmatch(one.name))]
    return [one for _, one in sorted((int(match[1]), one) for match, one in found if match[2] == ending)]


def _whole(shapes: Mapping[str, torch.Size], parts: list[Mapping[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    for name, shape in shapes.items():
        flat = torch.cat([part[name].flatten() for part in parts])
        yield name, flat[: shape.numel()].view(shape)


def _read(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    return state
