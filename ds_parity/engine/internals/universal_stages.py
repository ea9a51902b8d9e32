"""Universal checkpoints of a pipeline: what a conversion replaces of its tied layers, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.pipe import TiedLayerSpec

from ds_parity.engine.internals.changed_in_state import alike_tensors
from ds_parity.engine.internals.checkpoints import read
from ds_parity.engine.internals.model_names import with_versions
from ds_parity.engine.internals.stages import modules_of, shared_by_stages
from ds_parity.errors import CheckpointError

TIED: Final = "tied"
"""Under this name of a stage's state: where it has its tied layers."""

_AS_IT_WAS: Final = "Nothing was loaded; load the checkpoint on as many stages, with the layers that each one had"
_WITHOUT: Final = (
    "Nothing was loaded; load the checkpoint that was converted, with as many stages and columns, and without "
    "load_universal"
)


def places(model: Any) -> dict[str, list[int]]:
    """Return the numbers of the layers of this stage that are tied, by the keys of their `TiedLayerSpec`.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
    """
    found: dict[str, list[int]] = {key: [] for key in model.tied_modules}
    for number in _own_numbers(model):
        layer = model._layer_specs[number]
        if isinstance(layer, TiedLayerSpec):
            found[layer.key].append(number)
    return found


def _own_numbers(model: Any) -> list[int]:
    """The numbers of this stage's layers."""
    return [number for number in range(len(model._layer_specs)) if model.stage_owner(number) == model.stage_id]


def refused(
    model: Any, folder: Path, stepped: Iterable[Any], saved_places: Callable[[Mapping[str, Any]], Any], *, strict: bool
) -> str | None:
    """Return why this stage can't be loaded from a universal checkpoint, and the way out; None where it can.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        folder: of the checkpoint's tag, which need not be a universal one: then nothing is said here.
        stepped: the stage's parameters that the optimizer steps.
        saved_places: returns what `places` was of a stage, of what that has saved beside its layers; None if that is
            not in it.
        strict: a frozen weight or a buffer that the checkpoint lacks is an error; else it stays as it is.

    Raises:
        OSError: a file of the checkpoint can't be read.
    """
    if not (folder / "zero").is_dir():
        return None
    trained = {id(one) for one in stepped}
    if unlike := _of_another_stage(model, folder, trained, saved_places):
        return f"{unlike}. {_WITHOUT}"
    unlike = _unlike(model, folder, trained, strict=strict)
    return unlike or (_without_a_file(model, trained) if strict else None)


def refused_as_it_is(
    model: Any, folder: Path, stepped: Iterable[Any], saved_places: Callable[[Mapping[str, Any]], Any]
) -> str | None:
    """Return why this stage can't be loaded from a checkpoint that was not converted; None where it can.

    Weights alone are loaded on another number of stages, or with other layers on them. Each layer is read from its own
    file there, the last one of a tied layer on top of the others.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        folder: of the checkpoint's tag.
        stepped: the stage's parameters that the optimizer steps.
        saved_places: as in `refused`.

    Raises:
        OSError: a file of the checkpoint can't be read.
    """
    before: dict[tuple[int, str], tuple[str, Any]] = {}
    for file, layer in _files(model, folder):
        if layer not in model.tied_modules.values() or not file.is_file():
            continue
        saved = read(file)
        if parted := _parted(before, layer, file, saved, saved):
            return f"{parted}. {_AS_IT_WAS}"
    trained = {id(one) for one in stepped}
    own = [name for name, key in _own(model, trained).items() if model.tied_modules[key] not in modules_of(model)]
    stages = states(folder) if own else []
    for name in own:
        why = _kept_elsewhere(model, folder, name) or _had_elsewhere(model, trained, stages, saved_places, name)
        if why is not None:
            return f"no load gives {name} back, which this stage trains, and uses by a forward_fn: {why}. {_AS_IT_WAS}"
    return None


def own_parts(model: Any, stepped: Iterable[Any]) -> dict[str, int]:
    """Return the number of this stage by the names of what it trains of tied layers and does not share.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        stepped: the stage's parameters that the optimizer steps.
    """
    return dict.fromkeys(_own(model, {id(one) for one in stepped}), model.stage_id)


def of_several_stages(stages: Iterable[Mapping[str, int]]) -> str | None:
    """Return why a universal checkpoint can't be loaded by stages with these `own_parts`; None where it can."""
    found: dict[str, int] = {}
    for one in stages:
        for name, stage in one.items():
            if found.setdefault(name, stage) != stage:
                return (
                    f"stages {found[name]} and {stage} each train {name} of their own, of which it has one. {_WITHOUT}"
                )
    return None


def load_layers(model: Any, folder: Path, stepped: Iterable[Any], *, strict: bool) -> None:
    """Give a stage its frozen weights and buffers, out of the files of its layers that are in the folder.

    DeepSpeed loads what its optimizer steps (tools/deepspeed_faults/universal_without_layers.py, 0.19.8), and a
    conversion copies no files of layers. Those that `refused` has passed are read. What a layer takes is for its own
    load to say: it may rename, drop or make what its state has not yet.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        folder: of the checkpoint's tag.
        stepped: the stage's parameters that the optimizer steps.
        strict: what a file lacks of its layer, or has beside it, is an error; else it stays as it is, or is left out.

    Raises:
        CheckpointError: a layer's load misses something, or does not take what is there.
    """
    trained = {id(one) for one in stepped}
    for file, layer in _files(model, folder):
        if not file.is_file():
            continue
        saved, left = read(file, kept=True), _stepped_names(layer, trained)
        own = {name: value for name, value in saved.items() if name not in left}
        if not own:
            continue
        state = layer.state_dict()  # of trained weights, too, which its load may need to know what is made of them
        found = layer.load_state_dict(with_versions(own, saved, layer), strict=False)
        missing, more = (getattr(found, f"{which}_keys", ()) for which in ("missing", "unexpected"))
        lost, more = [name for name in missing if name not in left], [name for name in more if name not in state]
        if strict and (lost or more):
            what = f"has {more[0]}, which its layer does not take" if more else f"has no {lost[0]}"
            raise CheckpointError(
                f"the universal checkpoint's {file.name} {what}: load it into the pipeline that was saved, or give "
                f"load_module_strict=False to {'leave it out' if more else 'keep what this engine has'}. Loading ends "
                "half way, so start a new engine"
            )


def share_tied_weights(model: Any) -> None:
    """Give what stages share to all of them, as the first one has it; all ranks call it.

    A stage that uses a frozen tied layer by a `forward_fn` has no file of it.

    Args:
        model: DeepSpeed's PipelineModule.
    """
    model._synchronize_tied_weights()


def states(folder: Path) -> list[dict[str, Any]]:
    """Return what each stage has saved beside its layers.

    Args:
        folder: of the tag of a universal checkpoint.
    """
    return [read(file) for file in sorted(folder.glob("mp_rank_*_model_states.pt"))]


def _own(model: Any, trained: set[int]) -> dict[str, str]:
    """What this stage trains of tied layers beside what stages share, with the keys of the layers."""
    return {
        f"tied_modules.{key}.{name}": key
        for key, tied in model.tied_modules.items()
        for name, parameter in tied.named_parameters()
        if id(parameter) in trained and id(parameter) not in shared_by_stages(model, key)
    }


def _kept_elsewhere(model: Any, folder: Path, name: str) -> str | None:
    """Which file has such a part, where the layer was a module, and its file is not read any more."""
    _, key, own = name.split(".", 2)
    tied = places(model)[key]
    for at, number in enumerate(_own_numbers(model)):
        file = Path(model.ckpt_layer_path(str(folder), at))
        if number in tied and file.is_file() and own in read(file):
            return f"{file.name} has it, which DeepSpeed reads for a module alone"
    return None


def _had_elsewhere(
    model: Any,
    trained: set[int],
    stages: Sequence[Mapping[str, Any]],
    saved_places: Callable[[Mapping[str, Any]], Any],
    name: str,
) -> str | None:
    """Where a stage had the layer of a part, if not where this one has it.

    Else no gradient has reached the part, or it would not have been saved: it is what a new engine has.
    What it was saved in is not told by bare DeepSpeed, or a release before: the layers beside it are then.
    """
    key = name.split(".")[1]
    if len(stages) != model.num_stages:
        return f"{len(stages)} stages have saved the checkpoint, and {model.num_stages} load it"
    saved, here = stages[model.stage_id], places(model)[key]
    there = saved_places(saved)
    if there is None:
        then = _trained_then(saved)
        beside = name in then and _numbers(then) == _numbers(_trained_now(model, trained))
        why = f"stage {model.stage_id} of the checkpoint has trained no {name}, or had other layers"
        return None if beside else why
    layers = there.get(key, [])
    if layers == here:
        return None
    return f"stage {model.stage_id} had the tied layer {key!r} as the layers {layers}, and has it as {here}"


def _of_another_stage(
    model: Any, folder: Path, trained: set[int], saved_places: Callable[[Mapping[str, Any]], Any]
) -> str | None:
    """What this stage would get of another one, in the place of a part of its own.

    The conversion writes what has one name into one folder, where that of one stage replaces the others'
    (tools/deepspeed_faults/universal_of_stages.py, 0.19.8). The file of each stage tells what it has trained.
    """
    own = _own(model, trained)
    if not own:
        return None
    here, saved = places(model), states(folder)
    then = [_trained_then(one) for one in saved]
    for name, key in own.items():
        stages = [number for number, names in enumerate(then) if name in names]
        if len(stages) > 1:
            return f"each of several stages has saved {name} of its own, and the conversion keeps one"
        if not stages:
            continue  # refused as another set of trained parameters
        stage = stages[0]
        there = saved_places(saved[stage])
        if there is None:  # saved by bare DeepSpeed, or a release before this one: by the layers beside it
            beside = _numbers(then[stage]) == _numbers(_trained_now(model, trained))
            same = len(saved) == model.num_stages and stage == model.stage_id and beside
            where = "in layers that it does not tell"
        else:
            layers = there.get(key, [])
            same, where = set(here[key]) <= set(layers), f"in the layers {layers}"
        if not same:
            return (
                f"stage {stage} of {len(saved)} has saved {name} of its own, {where}, and stage {model.stage_id} of "
                f"{model.num_stages} trains it, in the layers {here[key]}"
            )
    return None


def _trained_now(model: Any, trained: set[int]) -> set[str]:
    return {name for name, one in model.named_parameters() if id(one) in trained}


def _numbers(names: Iterable[str]) -> set[str]:
    """The numbers of the layers that parameters are of, but for tied ones."""
    return {number for name in names if (number := name.partition(".")[0]).isdigit()}


def _trained_then(stage: Mapping[str, Any]) -> set[str]:
    return {name for group in stage.get("param_shapes") or () for name in group}


def _files(model: Any, folder: Path) -> Iterator[tuple[Path, torch.nn.Module]]:
    """Yield the file, which need not be there, of each layer of this stage that is a module."""
    for number, layer in enumerate(model.forward_funcs):
        if isinstance(layer, torch.nn.Module):
            yield Path(model.ckpt_layer_path(str(folder), number)), layer


def _untrained(model: Any, folder: Path, trained: set[int]) -> Iterator[tuple[Path, torch.nn.Module, list[str]]]:
    """Yield each layer of this stage with frozen weights or buffers, with the file that has it, and their names."""
    for file, layer in _files(model, folder):
        # A hook of a module may give the state other names, or copies of what is in it.
        stepped, state = _stepped_names(layer, trained), layer.state_dict(keep_vars=True)
        names = [name for name, one in state.items() if id(one) not in trained and name not in stepped]
        if names:
            yield file, layer, names


def _stepped_names(layer: torch.nn.Module, trained: set[int]) -> set[str]:
    return {name for name, one in layer.named_parameters(remove_duplicate=False) if id(one) in trained}


def _without_a_file(model: Any, trained: set[int]) -> str | None:
    """What no file has of tied layers that this stage uses by a `forward_fn`; the first one gives what is shared."""
    layers = modules_of(model)
    given = trained | {id(one) for layer in layers for one in layer.state_dict(keep_vars=True).values()}
    for key, tied in model.tied_modules.items():
        if tied in layers:
            continue  # its file has all of it, and a module's extra state is another object each time
        first = key not in model.tied_comms or model.global_rank == min(model.tied_comms[key]["ranks"])
        known = given if first else given | shared_by_stages(model, key)
        lost = [name for name, one in tied.state_dict(keep_vars=True).items() if id(one) not in known]
        if lost:
            return (
                f"no file of a layer has tied_modules.{key}.{lost[0]}, a frozen weight or a buffer that this stage "
                "uses by a forward_fn. Nothing was loaded; give load_module_strict=False to keep what this engine has"
            )
    return None


def _unlike(model: Any, folder: Path, trained: set[int], *, strict: bool) -> str | None:
    """What no file has of this stage, if it must be there, or one has in another shape.

    Or what two files have otherwise of a tied layer, which was on two stages then and is on one now.
    """
    before: dict[tuple[int, str], tuple[str, Any]] = {}
    for file, layer, names in _untrained(model, folder, trained):
        own, there = layer.state_dict(), file.is_file()
        saved = read(file) if there else {}
        if strict and not there:
            return (
                f"it has no {names[0]} of {file.name}, a frozen weight or a buffer: a conversion copies no files of a "
                "pipeline's layers. Nothing was loaded; copy the layer_*-model_states.pt of the checkpoint that was "
                "converted into its folder, or give load_module_strict=False to keep what this engine has"
            )
        for name in names:
            pair = own[name], saved.get(name)
            shapes = [tuple(one.shape) for one in pair if isinstance(one, torch.Tensor)]
            if len(shapes) > 1 and shapes[0] != shapes[1]:
                return f"{name} of {file.name} has the shape {shapes[1]}, and this model's has {shapes[0]}"
        if parted := _parted(before, layer, file, saved, names):
            return f"{parted}. {_WITHOUT}"
    return None


def _parted(
    before: dict[tuple[int, str], tuple[str, Any]],
    layer: torch.nn.Module,
    file: Path,
    saved: Mapping[str, Any],
    names: Iterable[str],
) -> str | None:
    """What a layer's file has otherwise than the first one of the same layer that has it, which `before` keeps."""
    for name in names:
        if name in saved:
            other, held = before.setdefault((id(layer), name), (file.name, saved[name]))
            if other != file.name and not _alike(held, saved[name]):
                return f"{name} of a tied layer is one in {other} and another in {file.name}"
    return None


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True  # extra state
    return alike_tensors(one, other)
