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
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_parity.engine.internals.model_names import name_of_state
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine, Parameter
from ds_parity.errors import CheckpointError


def changed_in_state(module: torch.nn.Module) -> dict[str, Parameter]:
    """Return by their names in a state those parameters that the state of a model does not have as they are.

    Args:
        module: the model.
    """
    own = module.state_dict(keep_vars=True)
    kept = set(map(id, own.values()))
    named = module.named_parameters(remove_duplicate=False)
    return {name_of_state(name): one for name, one in named if id(one) not in kept}


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
def written_as_they_are(engine: Engine, are_whole: Callable[[], bool]) -> Iterator[None]:
    """Return a context in which whole weights that are loaded into a model end as they were given, whatever hooks do.

    What a function of the caller's loads is its own.

    Args:
        engine: a bare DeepSpeed engine on ZeRO 3.
        are_whole: whether what is loaded then has whole weights, and not what ZeRO 3 saves in their place.
    """

    def behind(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(checkpoint: Mapping[str, Any], *args: Any, custom_load_fn: Any = None, **kwargs: Any) -> Any:
            result = load(checkpoint, *args, custom_load_fn=custom_load_fn, **kwargs)
            if custom_load_fn is None and are_whole():
                write(changed_in_state(engine.module), checkpoint["module"])
            return result

        return loaded

    with wrapped(engine, "load_module_state_dict", behind):
        yield
