"""DeepSpeed's own Adam over parameters as they are: one count of steps for a group, whatever has a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam

_MOMENT, _STEP = 2, 4  # what its kernel is given: exp_avg among the lists, and the count among the numbers behind them


class EvenCounts:
    """Steps that a group of DeepSpeed's Adam counts once, whichever of its parameters have a gradient.

    It steps each dtype of a group with the count of the last parameter that has a gradient, and adds to that one alone
    (ops/adam/fused_adam.py, 0.19.8). Behind a freeze another parameter is the last, and of two dtypes each adds to it.
    Here its kernel is given the group's own count, which all states have before and behind a step. A parameter without
    a state begins with its group's `step`.
    """

    def __init__(self, optimizer: FusedAdam) -> None:
        self._optimizer, self._kernel = optimizer, optimizer.multi_tensor_adam
        self._stepped: dict[int, int] = {}
        optimizer.multi_tensor_adam = self._with_count_of_group
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._behind)

    def _before(self, *_: Any) -> None:
        self._stepped = {}
        for group in self._optimizer.param_groups:
            self._count(group, max((int(state.get("step", 0)) for state in self._states(group)), default=0))

    def _with_count_of_group(self, size: int, overflow: torch.Tensor, lists: list[Any], *numbers: Any) -> Any:
        """Call the kernel with lists of tensors that are of one group and one dtype."""
        at = next(at for at, group in enumerate(self._optimizer.param_groups) if self._holds(group, lists[_MOMENT][0]))
        group = self._optimizer.param_groups[at]
        due = group["step"] + 1
        try:
            found = self._kernel(size, overflow, lists, *numbers[:_STEP], due, *numbers[_STEP + 1 :])
        except BaseException:
            # DeepSpeed has counted the step already.
            self._count(group, group["step"])
            raise
        self._stepped[at] = due
        return found

    def _behind(self, *_: Any) -> None:
        for at, count in self._stepped.items():
            self._count(self._optimizer.param_groups[at], count)

    def _count(self, group: dict[str, Any], count: int) -> None:
        group["step"] = count
        for state in self._states(group):
            state["step"] = count

    def _states(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        states = self._optimizer.state
        return (states[one] for one in group["params"] if one in states)

    def _holds(self, group: dict[str, Any], moment: torch.Tensor) -> bool:
        return any(state.get("exp_avg") is moment for state in self._states(group))
