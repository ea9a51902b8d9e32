"""Names of a model's parameters in its state, which a checkpoint has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

# What torch's checkpoint_wrapper puts into the names of parameters, and takes out of those of the state
# (torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, ActivationWrapper, 2.13.0).
_WRAPPER: Final = "_checkpoint_wrapped_module."

_VERSIONS: Final = "_metadata"  # torch's attribute of a state dict
_OWN_STATE: Final = "._extra_state"


def name_of_state(name: str) -> str:
    """Return the name that a parameter has in the state of its model.

    Args:
        name: as `named_parameters()` gives it.
    """
    return name.replace(_WRAPPER, "")


def is_own_state(name: str) -> bool:
    """Return whether a name in a model's state is of what a module saves of its own, which has any kind and shape.

    torch's `Module.get_extra_state` gives it, and no parameter is called so: one may end so (`my_extra_state`).
    """
    return f".{name}".endswith(_OWN_STATE)


def in_names_of(own: Iterable[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was saved by the names that parameters have here, wrapped or not at either side.

    Args:
        own: as `named_parameters()` gives them.
        saved: by such names of then; what has no name here is left out.
    """
    there = {name_of_state(name): value for name, value in saved.items()}
    return {name: there[key] for name in own if (key := name_of_state(name)) in there}


def names_of_one(module: torch.nn.Module) -> list[list[str]]:
    """Return the names of each weight that has several, in the state of a model.

    Args:
        module: the model.
    """
    found: dict[int, list[str]] = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(one), []).append(name_of_state(name))
    return [names for names in found.values() if len(names) > 1]


def with_versions(
    values: Mapping[str, Any], saved: Mapping[str, Any], module: torch.nn.Module
) -> OrderedDict[str, Any]:
    """Return a model's state with the versions of its modules, by which a module converts what an older one has saved.

    Without them torch takes every module for one that is older than all versions (Module._version, 2.13.0).

    Args:
        values: by their names in the model's state.
        saved: the state with which versions were saved; it may have none.
        module: the model that loads.
    """
    state = OrderedDict(values)
    versions = getattr(saved, _VERSIONS, None)
    if versions is not None:
        there = {_module_of_state(name): value for name, value in versions.items()}
        own = ((name, _module_of_state(name)) for name, _ in module.named_modules(remove_duplicate=False))
        setattr(state, _VERSIONS, OrderedDict((name, there[key]) for name, key in own if key in there))
    return state


def _module_of_state(name: str) -> str:
    return name_of_state(f"{name}.")[:-1]
