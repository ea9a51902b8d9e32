"""Parameters that are not frozen and that no optimizer steps: ZeRO 3 saves nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any, Final

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_parity.engine.internals.changed_in_state import refuse_another_shape
from ds_parity.engine.internals.model_names import name_of_state
from ds_parity.engine.internals.newcomers import stepped_by_others
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine, Parameter
from ds_parity.errors import CheckpointError

_FROZEN: Final = "frozen_param_fragments"
_SHAPES: Final = "frozen_param_shapes"
_MOST_NAMES: Final = 3

WHOLE_MODEL: Final = 3
"""The ZeRO stage that partitions a model's parameters, too."""


def saved_as_frozen(engine: Engine, stepped: Iterable[Parameter]) -> AbstractContextManager[None]:
    """Return a context in which ZeRO 3 saves the parameters that no optimizer steps with those that are frozen.

    DeepSpeed saves what is frozen, and what the optimizer has. A weight that is neither is in no file, and stays as the
    new engine's model has it behind a load, without an error (runtime/engine.py, _get_zero_frozen_param_attributes,
    0.16.9 to 0.19.8; tools/deepspeed_faults/unstepped_not_saved.py). What another engine over the model steps is saved,
    too, as on the other stages: that engine need not be there when this is loaded.

    Args:
        engine: a bare DeepSpeed engine, of any stage.
        stepped: the model's parameters that the optimizer steps.
    """
    return set_to(False, _in_no_group(engine, stepped).values())


def refuse_to_leave_out(engine: Engine, stepped: Iterable[Parameter]) -> None:
    """Raise CheckpointError where ZeRO 3 is to save nothing of what is frozen, and would leave out these, too.

    Args:
        engine: a bare DeepSpeed engine, of any stage.
        stepped: the model's parameters that the optimizer steps.
    """
    if named := of_none(engine, stepped):
        raise CheckpointError(
            f"save_checkpoint(exclude_frozen_parameters=True) on ZeRO stage 3: {_listed(sorted(named))} is not frozen, "
            "and in no group of the optimizer, and DeepSpeed would leave it out as well; leave "
            "exclude_frozen_parameters out, or freeze it (requires_grad_(False)) if it need not be saved"
        )


@contextmanager
def loaded_as_frozen(engine: Engine, stepped: Iterable[Parameter], *, strict: bool, custom: bool) -> Iterator[None]:
    """Return a context in which ZeRO 3 loads them so, and what is frozen in its own shape alone.

    DeepSpeed copies the part of a rank as it lies, into a weight of whatever shape (load_module_state_dict, 0.19.8).

    Args:
        engine: a bare DeepSpeed engine, of any stage.
        stepped: the model's parameters that the optimizer steps.
        strict: one that the checkpoint lacks is an error; else it stays as it is.
        custom: a function of the caller's loads the model, so that these stay as it leaves them.

    Raises:
        CheckpointError: the checkpoint lacks one: bare DeepSpeed saved it, or ds_parity before it saved these; or has
            one, or a frozen one, in another shape; or has one that a function of the caller's does not see.
    """
    named = of_none(engine, stepped)
    theirs = _of_others(engine, stepped)
    # Just now, as where two engines take turns; a tied one has several names.
    frozen = {id(one): one for one in theirs.values() if not one.requires_grad}.values()

    def finding(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            there = checkpoint.get(_FROZEN) or {}  # None where it was saved without what is frozen
            parts = _in_parts(named, checkpoint["module"])
            # Without the optimizer's states all that was stepped is given whole.
            lacking = sorted(set(parts) - there.keys())
            if custom and strict and parts:
                raise CheckpointError(_not_given(parts))
            if strict and not custom and lacking:
                raise CheckpointError(lacks(lacking))
            ours = [one for name, one in named.items() if name in there and not custom]
            with set_to(False, ours), set_to(True, frozen):
                _refuse_other_shapes(engine, checkpoint.get(_SHAPES) or {})
                return load({**checkpoint, "module": _with_own(theirs, checkpoint["module"])}, *args, **kwargs)

        return loaded

    if int(engine.zero_optimization_stage()) != WHOLE_MODEL:
        yield
        return
    with wrapped(engine, "load_module_state_dict", finding):
        yield


def refuse_doubtful_owners(engine: Engine, stepped: Iterable[Parameter]) -> None:
    """Raise CheckpointError where ZeRO 3 may be to load a weight, or to leave it to another engine.

    Args:
        engine: a bare DeepSpeed engine, of any stage.
        stepped: the model's parameters that its optimizer steps.
    """
    named = sorted(_of_others(engine, stepped, doubtful=True))
    if named:
        raise CheckpointError(
            f"load_checkpoint() on ZeRO stage 3: another engine over this model steps {_listed(named)}, and was used "
            "before this one was built, and not since. If this engine has taken its place, call the "
            "other one's destroy(), and the weights are loaded; if both are in use, give load_module_strict=False, "
            "which leaves them as they are"
        )


def _refuse_other_shapes(engine: Engine, saved: Mapping[str, Any]) -> None:
    for name, one in engine.module.named_parameters():
        if not one.requires_grad and name in saved:
            refuse_another_shape(name, saved[name], one)


def lacks(names: list[str]) -> str:
    """Return what to say of a checkpoint that has nothing of weights that are not frozen, and that nobody steps."""
    return (
        f"the checkpoint has no {_listed(names)}: ZeRO stage 3 of DeepSpeed saves nothing of a parameter that is not "
        "frozen, and is in no group of the optimizer, or another model was saved. Loading ends half way: start a new "
        "engine, with these weights in its model from where they came, and give load_module_strict=False, which keeps "
        "them"
    )


def _with_own(theirs: Mapping[str, Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """What is loaded of a model, with what it has already in place of the whole weights that are given of these.

    Without the optimizer's states DeepSpeed loads whole weights, and writes all of a model's. All ranks come here.
    """
    parts = _in_parts(theirs, given)
    whole = {name: one for name, one in theirs.items() if name not in parts}
    loaded = copy(given)  # with the attributes that torch gives a state dict (`_metadata`)
    with GatheredParameters(list(whole.values())):
        loaded.update({name_of_state(name): one.detach().to("cpu", copy=True) for name, one in whole.items()})
    return loaded


def _in_parts(named: Mapping[str, Parameter], given: Mapping[str, Any]) -> list[str]:
    """The names that a function of the caller's gets nothing of: without the optimizer's states it gets whole ones."""
    keys = {name: name_of_state(name) for name in named}
    return sorted(name for name, key in keys.items() if key not in given or not given_whole(named[name], given[key]))


def given_whole(parameter: Parameter, value: torch.Tensor) -> bool:
    """Return whether a state of a model has all elements of a parameter, and not the empty tensor of ZeRO 3."""
    return value.numel() == int(getattr(parameter, "ds_numel", parameter.numel()))


def _not_given(names: list[str]) -> str:
    return (
        f"a custom_load_fn is not given {_listed(names)}, which is not frozen, and in no group of the optimizer: with "
        "the states of the optimizer, ZeRO stage 3 of DeepSpeed gives it no whole weight. Loading ends half way: start "
        "a new engine, and leave custom_load_fn out to load it, or give load_module_strict=False, which leaves it as "
        "the function does"
    )


def _listed(names: list[str]) -> str:
    others = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{others}"


def of_none(engine: Engine, stepped: Iterable[Parameter]) -> dict[str, Parameter]:
    """Return by name the parameters that are not frozen, and that no optimizer steps; none on other stages than 3.

    What another engine over this model steps is in that one's checkpoint, and may be of another time in this one's.

    Args:
        engine: a bare DeepSpeed engine, of any stage.
        stepped: the model's parameters that its optimizer steps.
    """
    found = _in_no_group(engine, stepped)
    others = _of_others(engine, stepped) if found else {}
    return {name: one for name, one in found.items() if name not in others}


def _of_others(engine: Engine, stepped: Iterable[Parameter], *, doubtful: bool = False) -> dict[str, Parameter]:
    """By name what other engines step and this one does not, frozen or not; nothing on other stages than 3."""
    if int(engine.zero_optimization_stage()) != WHOLE_MODEL:
        return {}
    theirs = stepped_by_others(engine, doubtful=doubtful) - set(map(id, stepped))
    named = engine.module.named_parameters(remove_duplicate=False)
    return {name: one for name, one in named if id(one) in theirs}


def _in_no_group(engine: Engine, stepped: Iterable[Parameter]) -> dict[str, Parameter]:
    """By name what is not frozen, and what this engine's optimizer does not step; nothing on other stages than 3."""
    if int(engine.zero_optimization_stage()) != WHOLE_MODEL:
        return {}
    owned = set(map(id, stepped))
    return {
        name: one
        for name, one in engine.module.named_parameters()
        # DeepSpeed saves what has no elements with what is frozen.
        if one.requires_grad and id(one) not in owned and has_elements(one)
    }


def has_elements(parameter: Parameter) -> bool:
    """Return whether a parameter has elements, also where ZeRO 3 has partitioned it."""
    return bool(getattr(parameter, "ds_numel", parameter.numel()))


@contextmanager
def set_to(trained: bool, parameters: Iterable[Parameter]) -> Iterator[None]:
    """Return a context in which parameters are trained (requires_grad), or frozen, and the other way behind it."""
    held = []
    try:
        for one in parameters:
            one.requires_grad = trained
            held.append(one)
        yield
    finally:
        for one in held:
            one.requires_grad = not trained
