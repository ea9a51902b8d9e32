"""Universal checkpoints of a pipeline: what a conversion replaces of its tied layers, and what it leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch


def refused(model: Any, folder: Path, stepped: Iterable[Any], *, strict: bool) -> str | None:
    """Return why this stage can't be loaded from a universal checkpoint, and the way out; None where it can.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        folder: of the checkpoint's tag, which need not be a universal one: then nothing is said here.
        stepped: the stage's parameters that the optimizer steps.
        strict: a frozen weight or a buffer that the checkpoint lacks is an error; else it stays as it is.

    Raises:
        OSError: a file of the checkpoint can't be read.
    """
    if not (folder / "zero").is_dir():
        return None
    if name := _of_several_stages(model, folder):
        return (
            f"each of several stages has saved {name} of its own, and the conversion keeps one. Nothing was loaded; "
            "load the checkpoint that was converted, with as many stages and columns, and without load_universal"
        )
    lacking = _lacking(model, folder, stepped) if strict else None
    return lacking or _of_another_shape(model, folder, stepped)


def load_layers(model: Any, folder: Path, stepped: Iterable[Any]) -> None:
    """Give a stage its frozen weights and buffers, out of the files of its layers that are in the folder.

    DeepSpeed loads what its optimizer steps (tools/deepspeed_faults/universal_without_layers.py, 0.19.8), and a
    conversion copies no files of layers. Those that `refused` has passed are read.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        folder: of the checkpoint's tag.
        stepped: the stage's parameters that the optimizer steps.
    """
    for file, layer, names in _untrained(model, folder, stepped):
        if file.is_file():
            saved = _read(file)
            layer.load_state_dict({name: saved[name] for name in names if name in saved}, strict=False)


def share_tied_weights(model: Any) -> None:
    """Give what stages share to all of them, as the first one has it; all ranks call it.

    A stage that uses a frozen tied layer by a `forward_fn` has no file of it.

    Args:
        model: DeepSpeed's PipelineModule.
    """
    model._synchronize_tied_weights()


def _of_several_stages(model: Any, folder: Path) -> str | None:
    """The first name that trained parameters of several stages had, each with a value of its own.

    The conversion writes what has one name into one folder, where that of one stage replaces the others'
    (tools/deepspeed_faults/universal_of_stages.py, 0.19.8). The file of each stage tells what it has trained.
    """
    own = [
        f"tied_modules.{key}.{name}"
        for key, tied in model.tied_modules.items()
        for name, parameter in tied.named_parameters()
        # An attribute may be that of an inner module, or a property.
        if all(parameter is not attrgetter(shared)(tied) for shared in model.tied_weight_attrs[key])
    ]
    if not own:
        return None
    files = [_read(file) for file in folder.glob("mp_rank_*_model_states.pt")]
    stages = Counter(name for file in files for group in file.get("param_shapes") or () for name in group)
    return next((name for name in own if stages[name] > 1), None)


def _untrained(model: Any, folder: Path, stepped: Iterable[Any]) -> Iterator[tuple[Path, torch.nn.Module, list[str]]]:
    """Yield each layer of this stage with frozen weights or buffers, with the file that has it, and their names."""
    trained = {id(one) for one in stepped}
    for number, layer in enumerate(model.forward_funcs):
        if isinstance(layer, torch.nn.Module):
            parameters = dict(layer.named_parameters(remove_duplicate=False))
            own = layer.state_dict()
            names = [name for name in own if name not in parameters or id(parameters[name]) not in trained]
            if names:
                yield Path(model.ckpt_layer_path(str(folder), number)), layer, names


def _lacking(model: Any, folder: Path, stepped: Iterable[Any]) -> str | None:
    for file, _, names in _untrained(model, folder, stepped):
        lost = names[:1] if not file.is_file() else [name for name in names if name not in _read(file)]
        if lost:
            return (
                f"it has no {lost[0]} of {file.name}, a frozen weight or a buffer: a conversion copies no files of a "
                "pipeline's layers. Nothing was loaded; copy the layer_*-model_states.pt of the checkpoint that was "
                "converted into its folder, or give load_module_strict=False to keep what this engine has"
            )
    return None


def _of_another_shape(model: Any, folder: Path, stepped: Iterable[Any]) -> str | None:
    for file, layer, names in _untrained(model, folder, stepped):
        own, saved = layer.state_dict(), _read(file) if file.is_file() else {}
        for name in names:
            pair = own[name], saved.get(name)
            shapes = [tuple(one.shape) for one in pair if isinstance(one, torch.Tensor)]
            if len(shapes) > 1 and shapes[0] != shapes[1]:
                return f"{name} of {file.name} has the shape {shapes[1]}, and this model's has {shapes[0]}"
    return None


def _read(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    return state
