"""Parameters that a model's state has in another way than the model, and that ZeRO 3 saves as they are in the model.

A hook of the state, or a module's own `_save_to_state_dict`, gives a parameter another name or value, or packs several.
On ZeRO 3 those of a state are empty, and DeepSpeed saves a rank's part of each beside it. Where these are put together
and given to `load_state_dict()` (weights alone: runtime/engine.py, _load_checkpoint, 0.19.8), hooks of the load convert
what no hook has converted: without an error a weight is half of what was saved, or stays the new engine's
(tools/deepspeed_faults/converted_twice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_parity.engine.internals.model_names import name_of_state
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine, Parameter
from ds_parity.errors import CheckpointError


def changed_in_state(module: torch.nn.Module) -> dict[str, Parameter]:
    """Return by their names in a state those parameters that the state of a model does not have as they are.

    What is only copied there, or moved, is as it is. All ranks call it.

    Args:
        module: the model.
    """
    named = {name_of_state(name): one for name, one in module.named_parameters(remove_duplicate=False)}
    own = _with_parameters(module)
    other = {name: one for name, one in named.items() if own.get(name) is not one}
    partitioned = {id(one): one for one in other.values() if hasattr(one, "ds_id")}
    with GatheredParameters(list(partitioned.values())), torch.no_grad():
        kept = [(one, one.data.clone()) for one in {id(one): one for one in other.values()}.values()]
        try:
            for number, (one, data) in enumerate(kept):  # a zero stays one, and two weights may be alike
                drawn = torch.rand(data.shape, generator=torch.Generator().manual_seed(number), device="cpu")
                one.data.copy_(25 + 100 * drawn)
            state = module.state_dict() if other else {}
            return {name: one for name, one in other.items() if not _is_as_it_is(state.get(name), one)}
        finally:
            for one, data in kept:
                one.data.copy_(data)


def _with_parameters(module: torch.nn.Module) -> Mapping[str, Any]:
    """The state with the parameters themselves; of hooks that need tensors without a gradient, nothing is known."""
    try:
        with torch.no_grad():
            own: Mapping[str, Any] = module.state_dict(keep_vars=True)
            return own
    except Exception:
        return {}


def _is_as_it_is(value: Any, parameter: Parameter) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.dtype != parameter.dtype:
        return False
    return torch.equal(value.to(parameter.device), parameter.data)


def write(parameters: Mapping[str, Parameter], values: Mapping[str, Any]) -> None:
    """Write whole values into parameters, partitioned or not; those without a value stay. All ranks call it.

    Args:
        parameters: by name.
        values: by name, alike on every rank.

    Raises:
        CheckpointError: a value has another shape.
    """
    given = {name: one for name, one in parameters.items() if name in values}
    for name, one in given.items():
        refuse_another_shape(name, values[name], one)
    with GatheredParameters([one for one in given.values() if hasattr(one, "ds_id")], modifier_rank=0), torch.no_grad():
        for name, one in given.items():
            one.copy_(values[name])


def refuse_another_shape(name: str, value: torch.Tensor, parameter: Parameter) -> None:
    """Raise CheckpointError where what a checkpoint has of a parameter has not the parameter's shape."""
    own = tuple(getattr(parameter, "ds_shape", parameter.shape))
    if tuple(value.shape) != own:
        raise CheckpointError(
            f"the checkpoint's {name} has the shape {tuple(value.shape)}, and this model's has {own}: load it into the "
            "model that was saved. Loading ends half way, so start a new engine"
        )


@contextmanager
def written_as_they_are(engine: Engine, optional: Callable[[], set[str] | None]) -> Iterator[None]:
    """Return a context in which whole weights that are loaded into a model end as they were given, whatever hooks do.

    What a function of the caller's loads is its own.

    Args:
        engine: a bare DeepSpeed engine on ZeRO 3.
        optional: names of what hooks have made of a state, which those of the load need not know without the weights of
            which they have made it; None where what is loaded has no whole weights, but what ZeRO 3 saves of them.
    """

    def behind(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(checkpoint: Mapping[str, Any], *args: Any, custom_load_fn: Any = None, **kwargs: Any) -> Any:
            loading = partial(load, custom_load_fn=custom_load_fn)
            names = optional()
            if custom_load_fn is not None or names is None:
                return loading(checkpoint, *args, **kwargs)
            whole = checkpoint["module"]
            changed = {name: one for name, one in changed_in_state(engine.module).items() if name in whole}
            given = {name: whole[name].clone() for name in changed}  # hooks may write into what they are given
            try:
                result = loading(checkpoint, *args, **kwargs)
            except RuntimeError:  # torch lists what is unexpected
                if not names & whole.keys():
                    raise
                less = copy(whole)  # with the attributes that torch gives a state dict (`_metadata`)
                for name in names & whole.keys():
                    del less[name]
                result = loading({**checkpoint, "module": less}, *args, **kwargs)
            write(changed, given)
            return result

        return loaded

    with wrapped(engine, "load_module_state_dict", behind):
        yield
