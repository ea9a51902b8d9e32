"""Parameters that are not frozen and that no optimizer steps: ZeRO 3 saves nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine, Parameter
from ds_parity.errors import CheckpointError

_FROZEN: Final = "frozen_param_fragments"
_MOST_NAMES: Final = 3


@contextmanager
def saved_as_frozen(engine: Engine, stepped: Iterable[Parameter]) -> Iterator[None]:
    """Return a context in which ZeRO 3 saves the parameters that no optimizer steps with those that are frozen.

    DeepSpeed saves what is frozen, and what the optimizer has. A weight that is neither is in no file, and stays as the
    new engine's model has it behind a load, without an error (runtime/engine.py, _get_zero_frozen_param_attributes,
    0.16.9 to 0.19.8; tools/deepspeed_faults/unstepped_not_saved.py).

    Args:
        engine: a bare DeepSpeed engine, of any stage.
        stepped: the model's parameters that the optimizer steps.
    """
    with _frozen(_of_none(engine, stepped).values()):
        yield


@contextmanager
def loaded_as_frozen(engine: Engine, stepped: Iterable[Parameter], *, strict: bool) -> Iterator[None]:
    """Return a context in which ZeRO 3 loads them so.

    Args:
        engine: a bare DeepSpeed engine, of any stage.
        stepped: the model's parameters that the optimizer steps.
        strict: one that the checkpoint lacks is an error; else it stays as it is.

    Raises:
        CheckpointError: the checkpoint lacks one: bare DeepSpeed saved it, or ds_parity before it saved these.
    """
    named = _of_none(engine, stepped)

    def finding(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            there = checkpoint.get(_FROZEN)
            if there is None:  # saved without what is frozen
                return load(checkpoint, *args, **kwargs)
            lacking = sorted(named.keys() - there.keys())
            if strict and lacking:
                raise CheckpointError(lacks(lacking))
            with _frozen(one for name, one in named.items() if name in there):
                return load(checkpoint, *args, **kwargs)

        return loaded

    with wrapped(engine, "load_module_state_dict", finding if named else lambda load: load):
        yield


def lacks(names: list[str]) -> str:
    """Return what to say of a checkpoint that has nothing of weights that are not frozen, and that nobody steps."""
    others = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (
        f"the checkpoint has no {', '.join(names[:_MOST_NAMES])}{others}: ZeRO stage 3 of DeepSpeed saves nothing of a "
        "parameter that is not frozen, and is in no group of the optimizer. Give load_module_strict=False to keep what "
        "this engine has, and load those weights into the model from where they came"
    )


def _of_none(engine: Engine, stepped: Iterable[Parameter]) -> dict[str, Parameter]:
    if int(engine.zero_optimization_stage()) != 3:
        return {}
    owned = {id(one) for one in stepped}
    return {
        name: one
        for name, one in engine.module.named_parameters()
        # DeepSpeed saves what has no elements with what is frozen.
        if one.requires_grad and id(one) not in owned and getattr(one, "ds_numel", one.numel()) > 0
    }


@contextmanager
def _frozen(parameters: Iterable[Parameter]) -> Iterator[None]:
    held = list(parameters)
    for one in held:
        one.requires_grad = False
    try:
        yield
    finally:
        for one in held:
            one.requires_grad = True
