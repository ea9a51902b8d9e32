"""DeepSpeed's own Adam over parameters as they are: one count of steps for a group, and one dtype at a time."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch


class EvenCounts:
    """Steps that a group of DeepSpeed's Adam counts once, whichever of its parameters have a gradient.

    It steps each dtype of a group with the count of the last parameter that has a gradient, and adds to that one alone
    (ops/adam/fused_adam.py, 0.19.8). Behind a freeze another parameter is the last, and of two dtypes each adds to it.
    A parameter without a state begins with its group's `step`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._behind)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._groups = optimizer.param_groups
        for group in self._groups:
            states = [optimizer.state[one] for one in group["params"] if one in optimizer.state]
            group["step"] = max((state.get("step", 0) for state in states), default=0)
            for state in states:
                state["step"] = group["step"]
        optimizer.param_groups = [one for group in self._groups for one in _by_dtype(group)]

    def _behind(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups = self._groups


def _by_dtype(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a group for each dtype of its parameters; the group itself where they have one."""
    kinds = [list(some) for _, some in groupby(sorted(group["params"], key=_kind), key=_kind)]
    return [group] if len(kinds) < 2 else [{**group, "params": some} for some in kinds]


def _kind(parameter: torch.Tensor) -> str:
    return str(parameter.dtype)
