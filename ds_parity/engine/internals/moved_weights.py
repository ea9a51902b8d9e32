"""Weights that a step has changed between a forward and its backward.

DeepSpeed's ZeRO writes new weights through `.data`, which autograd does not see: the backward of a forward that lies in
front of the step then takes the new weights with the old activations, and its gradient is that of neither. Bare
DeepSpeed says nothing (tools/deepspeed_faults/forward_before_the_step.py); torch's own optimizers are seen (ZeRO 0 in
fp32). Two things are asked here: of what `engine(x)` has returned, when it was; and of weights that the graph holds,
whichever way it was made, whether they are as they were. Activation checkpointing holds no weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from ds_parity.errors import WindowError

_TORCH_SAYS = "modified by an inplace operation"
_RULE = (
    "The gradient would mix old activations with new weights: run each forward behind the last step(), and its "
    "backward before the next. The pass is counted, so load a checkpoint into a new engine"
)


class MovedWeights:
    """Knows how many steps have changed the weights of an engine."""

    def __init__(self) -> None:
        self._steps = 0

    def count(self, groups: Iterable[Iterable[torch.Tensor]]) -> None:
        """Count a step that has changed parameters, of which autograd is told, as torch's own optimizers tell it.

        Args:
            groups: the parameters that the optimizer steps.
        """
        self._steps += 1
        # A parameter that was made under inference_mode() has no version, and is in no graph either.
        moved = [one for group in groups for one in group if not one.is_inference()]
        torch.autograd.graph.increment_version(moved)
        # One autocast around the whole loop would go on with its bf16 copies of the weights as they were.
        torch.clear_autocast_cache()

    def remember(self, returned: Any) -> None:
        """Have a backward through what a forward has returned raise WindowError once a step has changed the weights.

        Args:
            returned: by the model: tensors in dicts, lists, tuples and dataclasses.
        """
        if torch.compiler.is_compiling():
            return
        then = self._steps

        def refuse(gradient: torch.Tensor) -> None:
            if self._steps != then:
                raise WindowError(
                    f"backward() of a forward that ran before the last step(): {self._steps - then} step(s) have "
                    f"changed the weights since. {_RULE}"
                )

        for one in _tensors(returned):
            if one.grad_fn is not None:  # a parameter, or an input, that is returned as it is comes again
                one.register_hook(refuse)  # type: ignore[no-untyped-call]

    def explain(self, error: RuntimeError) -> None:
        """Raise WindowError where a backward needs what was changed in place since its forward, and there was a step.

        Args:
            error: that torch has raised in a backward; anything else passes.
        """
        if self._steps and _TORCH_SAYS in str(error):
            raise WindowError(
                f"torch says in backward(): {error}. If a step() lies between this backward and its forward, the step "
                f"has changed the weights. {_RULE}. Otherwise an operation in place in the model has changed what its "
                "own backward needs"
            ) from error


def _tensors(returned: Any) -> Iterator[torch.Tensor]:
    for leaf in _pytree.tree_leaves(returned):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors(list(vars(leaf).values()))
