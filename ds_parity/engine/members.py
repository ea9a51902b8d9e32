"""Which parameters a checkpoint is of: DeepSpeed looks there for those of this engine alone, by name or by size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch

from ds_parity.engine.half_loaded import HALF_WAY
from ds_parity.engine.internals.checkpoints import has_experts
from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import CheckpointError

MEMBERS: Final = "members"
"""Under this name of the window's state."""

_Groups = Iterable[Iterable[torch.nn.Parameter]]
_Shapes = Sequence[Mapping[str, Sequence[int]]]


def members(engine: Engine, groups: _Groups) -> list[dict[str, list[int]]]:
    """Return the shapes of an optimizer's parameters by name, group by group, as a checkpoint keeps them.

    Args:
        engine: a bare DeepSpeed engine.
        groups: the parameters of its optimizer's groups.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
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
    here, universal = members(engine, groups), engine.load_universal_checkpoint()
    if universal:
        if has_experts(engine):
            return
        _refuse_others(set(chain.from_iterable(there)), set(chain.from_iterable(here)))
        _refuse_other_groups(there, here)
    # Of tensor parallelism a rank has a part, which another number of ranks makes longer or shorter.
    parts = {id(one) for group in groups for one in group if getattr(one, "tensor_model_parallel", False)}
    for saved, own, group in zip(there, here, groups, strict=False):
        before = saved if named or universal else dict(zip(own, saved.values(), strict=False))
        for one, (name, shape) in zip(group, own.items(), strict=False):
            if before.get(name, shape) != shape and not (universal and id(one) in parts):
                raise CheckpointError(
                    f"the parameter {name!r} has the shape {tuple(before[name])} in the checkpoint, and {tuple(shape)} "
                    "here: it is of another model. DeepSpeed takes weights and states of ZeRO by their number of "
                    f"elements, and has put them there. Load it into the model that saved it. {HALF_WAY}"
                )


def _refuse_other_groups(there: _Shapes, here: _Shapes) -> None:
    if [set(group) for group in there] != [set(group) for group in here]:
        raise CheckpointError(
            f"the universal checkpoint's parameter groups are not this engine's: {_in_words(there)}, and here "
            f"{_in_words(here)}. DeepSpeed has given each group the learning rate and the weight decay of the one with "
            f"its number. Load it with the groups that saved it, in their order. {HALF_WAY}"
        )


def _refuse_others(there: set[str], here: set[str]) -> None:
    lost, new = sorted(there - here), sorted(here - there)
    if lost or new:
        said = f"it has {lost[0]!r}, which is not trained here" if lost else f"it has no {new[0]!r}"
        raise CheckpointError(
            f"the universal checkpoint is of another model, or of other trained parameters: {said}. Load it into the "
            f"model that saved it, with the trained parameters of then. {HALF_WAY}"
        )


def _in_words(groups: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"group {number} of {len(group)} with {next(iter(group), 'none')!r}" for number, group in enumerate(groups)
    )
