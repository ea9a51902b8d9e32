"""Names of a model's parameters in its state, which a checkpoint has."""

from __future__ import annotations

from typing import Final

# What torch's checkpoint_wrapper puts into the names of parameters, and takes out of those of the state
# (torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, ActivationWrapper, 2.13.0).
_WRAPPER: Final = "_checkpoint_wrapped_module."


def name_of_state(name: str) -> str:
    """Return the name that a parameter has in the state of its model.

    Args:
        name: as `named_parameters()` gives it.
    """
    return name.replace(_WRAPPER, "")
