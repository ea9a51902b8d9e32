"""Universal checkpoints: what one lacks, and the frozen weights and buffers in it, which DeepSpeed does not load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_parity.engine.internals.changed_in_state import (
    changed_in_state,
    has_own_load,
    on_any_rank,
    refuse_another_shape,
    write,
)
from ds_parity.engine.internals.checkpoints import beside_weights, read, saved_in_parts
from ds_parity.engine.internals.model_names import name_of_state, with_versions
from ds_parity.engine.internals.newcomers import stepped_by_others
from ds_parity.engine.internals.surface import Engine, Parameter
from ds_parity.engine.internals.unstepped import WHOLE_MODEL, has_elements, lacks, of_none
from ds_parity.errors import CheckpointError

_WEIGHTS: Final = "fp32"
_MOMENTS: Final = {"exp_avg", "exp_avg_sq"}
_OF_RANK: Final = re.compile(r"zero_pp_rank_(\d+)_(mp_rank_\d+_model_states\.pt)")


def incomplete(engine: Engine, folder: Path, stepped: Iterable[Parameter]) -> str | None:
    """Return what a universal checkpoint lacks of its parameters' files; None where nothing is missing.

    On ZeRO 1 and 2 DeepSpeed loads what it finds in a parameter's folder, and leaves its weights as they are where the
    file of its weights is gone (checkpoint/universal_checkpoint.py, load_hp_checkpoint_state, 0.19.8). Only the rank
    that has a parameter looks for its folder, and the others wait for it.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        folder: of the checkpoint's tag, which need not be a universal one: then nothing is said here.
        stepped: the model's parameters that the optimizer steps, as far as they have names of the checkpoint.

    Raises:
        OSError: a folder can't be listed.
    """
    zero = folder / "zero"
    if not zero.is_dir():
        return None
    there = dict(_by_folder(zero))
    for name, files in sorted(there.items()):
        # Of a group that has had no gradient yet, and of what is frozen, a conversion makes a file of weights alone.
        lost = {_WEIGHTS, *(_MOMENTS if files & _MOMENTS else ())} - files
        if lost:
            return f"zero/{name}/{min(lost)}.pt"
    wanted = {id(one) for one in stepped}
    names = [name for name, one in engine.module.named_parameters() if id(one) in wanted and has_elements(one)]
    lacking = next((name for name in names if name not in there), None)
    return _without_moments(engine, there) if lacking is None else f"zero/{lacking}"


def _by_folder(zero: Path) -> Iterator[tuple[str, set[str]]]:
    """By the names of parameters, which may hold slashes, the names of their files."""
    for one in filter(Path.is_dir, zero.rglob("*")):
        files = {file.stem for file in one.glob("*.pt")}
        # A folder of folders alone is a part of their parameters' names, and one inside a parameter's is somebody's.
        inside = one.parent != zero and any(one.parent.glob("*.pt"))
        if files or not (inside or any(inner.is_dir() for inner in one.iterdir())):
            yield one.relative_to(zero).as_posix(), files


def _without_moments(engine: Engine, there: Mapping[str, set[str]]) -> str | None:
    """What a parameter lacks that was frozen when it was saved, and is stepped in one group with others; else None.

    A rank of ZeRO 1 and 2 that has a part of both asserts, and the others wait for it (link_hp_params of
    utils/tensor_fragment.py, and load_hp_checkpoint_state, 0.19.8: "Steps [...] are not equal").
    """
    names = {id(one): name for name, one in engine.module.named_parameters()}
    for group in getattr(getattr(engine, "optimizer", None), "bit16_groups", ()):
        own_names = (names.get(id(one), "") for one in group)
        files = {name: there[name] for name in own_names if name in there}
        if any(own >= _MOMENTS for own in files.values()):
            for name, own in files.items():
                if not _MOMENTS & own:
                    return f"zero/{name}/{min(_MOMENTS)}.pt"
    return None


def load_untrained(engine: Engine, path: str, stepped: Iterable[Parameter], *, strict: bool) -> None:
    """Give a model the buffers and frozen weights of a universal checkpoint, of which DeepSpeed loads none.

    Its load reads the parameters that an optimizer has, and passes over the model's own state (runtime/engine.py,
    _load_checkpoint, 0.19.8; tools/deepspeed_faults/universal_without_buffers.py). Both are in the files of the model,
    which the conversion copies. On ZeRO 3 each rank's file has a part of the frozen weights. All ranks call it.

    Args:
        engine: that has loaded the checkpoint, inside `any_shape_is_gathered`.
        path: of the model's file, as DeepSpeed's load returns it.
        stepped: the model's parameters that the optimizer steps.
        strict: a weight or a buffer that the checkpoint lacks is an error; else it stays as it is.

    Raises:
        CheckpointError: the checkpoint lacks one, has one that this model has not, or one in another shape.
    """
    parameters = {name_of_state(name): one for name, one in engine.module.named_parameters(remove_duplicate=False)}
    stepped = list(stepped)
    loaded = {id(one) for one in stepped}
    if int(engine.zero_optimization_stage()) == WHOLE_MODEL:  # where what another engine over this model steps is left
        loaded |= stepped_by_others(engine)
    left = {name for name, one in parameters.items() if id(one) in loaded}
    own = set(map(name_of_state, engine.module.state_dict()))
    if not (own | _names(read(Path(path)))) - left:
        return
    first = read(Path(path), kept=True)
    saved, made = _saved(first, path, engine.module)
    there = {name: value for name, value in saved.items() if name not in left}
    held = there | _of_other_names(there, {name: one for name, one in parameters.items() if name not in left})
    # On ZeRO 3 no hook of the state has converted frozen weights, and those of the load would convert them back.
    partitioned = {name: one for name, one in parameters.items() if name in held and hasattr(one, "ds_id")}
    for name, one in partitioned.items():
        refuse_another_shape(name, held[name].shape, one)
    changed = changed_in_state(engine.module, partitioned, held)
    write(changed.parameters, held)
    given = changed.put_into(engine.module, held)
    with GatheredParameters([*partitioned.values()], modifier_rank=0):
        # What a rank writes into a gathered parameter is the first one's anyway.
        found = engine.module.load_state_dict(with_versions(given, first["module"], engine.module), strict=False)
    write(changed.parameters, held)  # hooks may have rounded them
    if strict:
        missing, more = (map(name_of_state, getattr(found, f"{which}_keys", ())) for which in ("missing", "unexpected"))
        absent = [name for name in missing if name not in left | changed.parameters.keys()]
        if has_own_load(engine.module):  # it may return nothing, and leave out of its state what it does not load
            absent = [name for name in absent if name in own]
        unexpected = [*more]
        # What hooks have made of weights need not be known where these are there without them.
        (doubtful,) = on_any_rank([bool(made.intersection(unexpected))])
        if doubtful and (changed.parameters or changed_in_state(engine.module, parameters).parameters):
            unexpected = [name for name in unexpected if name not in made]
        _refuse_other_names(absent, unexpected, set(map(name_of_state, of_none(engine, stepped))))


def _refuse_other_names(absent: list[str], unexpected: list[str], nobodys: set[str]) -> None:
    if lost := [name for name in absent if name in nobodys]:
        raise CheckpointError(lacks(lost))
    way_out = "load it into the model that was saved, or give load_module_strict=False to"
    if absent:
        raise CheckpointError(
            f"the universal checkpoint has no {_first_of(absent)}, a buffer or a weight of this model that is not "
            f"stepped: {way_out} keep what this engine has"
        )
    if unexpected:
        raise CheckpointError(
            f"the universal checkpoint has {_first_of(unexpected)}, and this model has no buffer, and no weight that "
            f"is not stepped, of this name: {way_out} leave it out"
        )


def _first_of(names: list[str]) -> str:
    return names[0] + (f", and {len(names) - 1} more" if names[1:] else "")


def refuse_left_over(engine: Engine, path: str) -> None:
    """Raise CheckpointError where a universal checkpoint has the model's files of more ranks than have saved it.

    Args:
        engine: that has loaded it.
        path: of the model's file, as DeepSpeed's load returns it.
    """
    file, saved = Path(path), saved_in_parts(engine)
    of_rank = _OF_RANK.fullmatch(file.name)  # the model has a file for each rank on ZeRO 3 alone
    there = 0 if of_rank is None else len(_of_all_ranks(file, of_rank[2]))
    if saved is not None and there > saved:
        raise CheckpointError(
            f"the universal checkpoint in {file.parent} has the files of {there} ranks, and {saved} have saved it. If "
            "those of an earlier save under its tag were converted with it, DeepSpeed has cut all parts wrongly; if "
            "they are of an earlier conversion, all is right. Remove zero_pp_rank_* of ranks from "
            f"{saved} on from the folder that was converted, and convert it again into an empty folder. Loading ends "
            "half way, so start a new engine"
        )


def _of_other_names(there: Mapping[str, Any], wanted: Mapping[str, Parameter]) -> dict[str, Any]:
    """What a checkpoint has of tied parameters, of which ZeRO 3 saves one name, by their other names."""
    by_parameter = {id(one): there[name] for name, one in wanted.items() if name in there}
    return {
        name: by_parameter[id(one)] for name, one in wanted.items() if name not in there and id(one) in by_parameter
    }


def _names(first: Mapping[str, Any]) -> set[str]:
    return set(map(name_of_state, (*first["module"], *(first.get("frozen_param_shapes") or ()))))


def _saved(first: Mapping[str, Any], path: str, module: torch.nn.Module) -> tuple[dict[str, Any], set[str]]:
    """The model's state in its file, or files: whole tensors by name; of ZeRO 3 frozen weights and buffers alone.

    The second are the names of what hooks of the state have made there.
    """
    file = Path(path)
    found = {name_of_state(name): value for name, value in first["module"].items()}
    of_rank = _OF_RANK.fullmatch(file.name)
    if of_rank is None:
        return found, set()
    shapes = first.get("frozen_param_shapes") or {}
    parts = [read(one).get("frozen_param_fragments") or {} for one in _of_all_ranks(file, of_rank[2])]
    own, made = beside_weights(first, module)
    return made | own | {name_of_state(name): value for name, value in _whole(shapes, parts)}, set(made)


def _of_all_ranks(file: Path, ending: str) -> list[Path]:
    found = [(match, one) for one in file.parent.iterdir() if (match := _OF_RANK.fullmatch(one.name))]
    return [one for _, one in sorted((int(match[1]), one) for match, one in found if match[2] == ending)]


def _whole(shapes: Mapping[str, torch.Size], parts: list[Mapping[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    for name, shape in shapes.items():
        flat = torch.cat([part[name].flatten() for part in parts])
        yield name, flat[: shape.numel()].view(shape)
