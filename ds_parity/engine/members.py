"""Which parameters a checkpoint is of: DeepSpeed looks there for those of this engine alone, by name or by size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch

from ds_parity.engine.half_loaded import HALF_WAY
from ds_parity.engine.internals.checkpoints import has_experts
from ds_parity.engine.internals.model_names import name_of_state
from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import CheckpointError

MEMBERS: Final = "members"
"""Under this name of the window's state."""

_NOTHING: Final = "Nothing was loaded"

_Groups = Iterable[Iterable[torch.nn.Parameter]]
_Shapes = Sequence[Mapping[str, Sequence[int]]]


def members(engine: Engine, groups: _Groups, *, as_named: bool = False) -> list[dict[str, list[int]]]:
    """Return the shapes of an optimizer's parameters by name, group by group, as a checkpoint keeps them.

    Args:
        engine: a bare DeepSpeed engine.
        groups: the parameters of its optimizer's groups.
        as_named: by the names that DeepSpeed has for them, and not by those of the model's state.
    """
    named = engine.module.named_parameters()
    names = {id(parameter): name if as_named else name_of_state(name) for name, parameter in named}
    # On ZeRO 3 a parameter has its shape beside an empty tensor.
    return [{names.get(id(one), ""): list(getattr(one, "ds_shape", one.shape)) for one in group} for group in groups]


def refuse_other_members(engine: Engine, state: Mapping[str, Any], groups: _Groups, *, named: bool) -> None:
    """Raise CheckpointError where a checkpoint that was loaded is of parameters of other shapes.

    Of a universal one, also where it is of other parameters, or of other groups: DeepSpeed takes what has a parameter's
    name, leaves the others where they are, and gives each group the learning rate and weight decay of the one with its
    number (runtime/zero/stage_1_and_2.py and stage3.py, _load_universal_checkpoint, 0.19.8). In others that shows in
    the states' owners (`kept_states`).

    Args:
        engine: a bare DeepSpeed engine.
        state: what the checkpoint has of the window; without `members` where a release of before, or bare DeepSpeed,
            saved it.
        groups: the parameters of this engine's optimizer's groups.
        named: parameters have the names here that they had there; else some may have others, in the same places. In a
            universal checkpoint they are found by their names, and none may have another.
    """
    there, groups = state.get(MEMBERS), [list(group) for group in groups]
    if not there:
        return
    there = [{name_of_state(name): shape for name, shape in group.items()} for group in there]
    here, universal = members(engine, groups), engine.load_universal_checkpoint()
    if universal:
        if has_experts(engine):
            return
        _refuse_others(set(chain.from_iterable(there)), set(chain.from_iterable(here)), HALF_WAY)
        _refuse_other_groups(there, here, HALF_WAY)
    # Of tensor parallelism a rank has a part, which another number of ranks makes longer or shorter.
    parts = {id(one) for group in groups for one in group if getattr(one, "tensor_model_parallel", False)}
    for saved, own, group in zip(there, here, groups, strict=False):
        before = saved if named or universal else dict(zip(own, saved.values(), strict=False))
        for one, (name, shape) in zip(group, own.items(), strict=False):
            if before.get(name, shape) != shape and not (universal and id(one) in parts):
                raise CheckpointError(
                    f"the parameter {name!r} has the shape {tuple(before[name])} in the checkpoint, and {tuple(shape)} "
                    "here: it is of another model, or was saved with another tensor_parallel.autotp_size. DeepSpeed "
                    "takes weights and states of ZeRO by their number of elements, and has put them there. Load it "
                    f"into the model that saved it, with that size. {HALF_WAY}"
                )


def of_all_stages(stages: Iterable[_Shapes]) -> list[dict[str, Sequence[int]]]:
    """Return the members of a pipeline's optimizers: of each group what all stages have in it."""
    found: list[dict[str, Sequence[int]]] = []
    for groups in stages:
        found += [{} for _ in range(len(groups) - len(found))]
        for group, own in zip(found, groups, strict=False):
            group.update(own)
    return found


def refuse_other_pipeline(there: _Shapes, here: _Shapes) -> None:
    """Raise CheckpointError where a universal checkpoint, of which nothing is loaded yet, is of another pipeline.

    Args:
        there: the members of all stages that saved it, as `of_all_stages` returns them.
        here: those of all stages that are about to load it.
    """
    before, own = ({name: list(one[name]) for one in side for name in one} for side in (there, here))
    _refuse_others(set(before), set(own), _NOTHING)
    _refuse_other_groups(there, here, _NOTHING)
    name = next((name for name in own if own[name] != before[name]), None)
    if name is not None:
        raise CheckpointError(
            f"the parameter {name!r} has the shape {tuple(before[name])} in the universal checkpoint, and "
            f"{tuple(own[name])} here: it is of another model. Load it into the model that saved it. {_NOTHING}"
        )


def refuse_other_names(there: set[str], here: _Shapes) -> None:
    """As `refuse_other_pipeline`, of a checkpoint that tells no more than the names of its parameters."""
    _refuse_others(there, set(chain.from_iterable(here)), _NOTHING)


def _refuse_other_groups(there: _Shapes, here: _Shapes, so_far: str) -> None:
    if [set(group) for group in there] != [set(group) for group in here]:
        raise CheckpointError(
            f"the universal checkpoint's parameter groups are not this engine's: {_in_words(there)}, and here "
            f"{_in_words(here)}. DeepSpeed gives each group the learning rate and the weight decay of the one with "
            f"its number. Load it with the groups that saved it, in their order. {so_far}"
        )


def _refuse_others(there: set[str], here: set[str], so_far: str) -> None:
    lost, new = sorted(there - here), sorted(here - there)
    if lost or new:
        said = f"it has {lost[0]!r}, which is not trained here" if lost else f"it has no {new[0]!r}"
        raise CheckpointError(
            f"the universal checkpoint is of another model, or of other trained parameters: {said}. Load it into the "
            f"model that saved it, with the trained parameters of then. {so_far}"
        )


def _in_words(groups: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"group {number} of {len(group)} with {next(iter(group), 'none')!r}" for number, group in enumerate(groups)
    )
