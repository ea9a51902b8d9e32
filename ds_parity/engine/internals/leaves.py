"""Refuses what ZeRO 3 does wrong with a leaf module: DeepSpeed reduces its gradients in a hook on the whole module.

torch runs such a hook when the gradients of the module's inputs are there, and they come after those of its parameters.
Where no input requires one it runs the hook before all of them, and where it sees no output it never does
(tools/deepspeed_faults/leaf_hooks.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from deepspeed.utils import z3_leaf_parameter

from ds_parity.engine.internals.surface import Parameter, Zero3Parameter
from ds_parity.errors import WindowError

_WAY_OUT = (
    "make it no leaf (zero_optimization.leaf_module, deepspeed.utils.set_z3_leaf_modules, "
    "zero_optimization.stage3_module_granularity_threshold), or make a module inside it the leaf that is called by "
    "position with hidden states, and returns a tensor or a tuple of tensors"
)


class Leaves:
    """The leaf modules of a model on ZeRO 3 that have something to train.

    Args:
        model: that DeepSpeed has partitioned.
        trained: its parameters that require a gradient.
    """

    def __init__(self, model: torch.nn.Module, trained: Iterable[Parameter]) -> None:
        self._parameters = [p for p in trained if z3_leaf_parameter(p)]
        leaves = {id(cast("Zero3Parameter", p).ds_z3_leaf_module) for p in self._parameters}
        for name, module in model.named_modules():
            if id(module) in leaves:
                _watch(f"leaf module {name or 'model'} ({type(module).__name__})", module)
        self._names = {id(p): name for name, p in model.named_parameters()}

    def refuse_unreduced(self) -> None:
        """Raise WindowError where a backward has left a gradient that DeepSpeed has not reduced."""
        left = [self._names[id(p)] for p in self._parameters if p.grad is not None]
        if left:
            raise WindowError(
                f"{left[0]}{f' and {len(left) - 1} more' if left[1:] else ''}: DeepSpeed has not reduced its gradient, "
                "because torch runs no backward hook of its leaf module where the gradient does not pass through its "
                f"outputs to its inputs. It would be lost, so load a checkpoint into a new engine; {_WAY_OUT}"
            )


def _watch(name: str, module: torch.nn.Module) -> None:
    def refuse(_: torch.nn.Module, given: tuple[Any, ...], returned: object) -> None:
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in _tensors(returned)):
            return
        seen = returned if isinstance(returned, tuple) else (returned,)
        if not _any_requires_grad(seen):
            raise WindowError(
                f"{name} returns a {type(returned).__name__} in which torch does not see the tensors that require a "
                "gradient (it looks at a tensor, and at the elements of a tuple), and on ZeRO stage 3 DeepSpeed "
                "reduces the gradients of a leaf module in a hook that torch does not run then: they would be lost; "
                f"{_WAY_OUT}"
            )
        if not _any_requires_grad(given):
            raise WindowError(
                f"{name} is given no tensor that requires a gradient by position, and on ZeRO stage 3 DeepSpeed "
                "reduces the gradients of a leaf module in a hook that torch runs before they are there then: the "
                f"first module of a model and an embedding can't be leaves; {_WAY_OUT}"
            )

    module.register_forward_hook(refuse)


def _any_requires_grad(values: Iterable[object]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
