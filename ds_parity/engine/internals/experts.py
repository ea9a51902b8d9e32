"""The norm of gradients where each rank has experts of its own (DeepSpeed's MoE, `ep_size` above 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist

from ds_parity.all_weights import is_layer_of_experts
from ds_parity.engine.internals.surface import ExpertLayer


def groups_of_experts(module: torch.nn.Module) -> dict[int, Any]:
    """Return by the `id` of each parameter of an expert the ranks that have the experts of its layer among them."""
    layers: list[ExpertLayer] = [cast(ExpertLayer, one) for one in module.modules() if is_layer_of_experts(one)]
    return {id(p): one.ep_group for one in layers for p in one.experts.parameters()}


def squares_of(parameters: Iterable[torch.Tensor], groups: dict[int, Any]) -> list[torch.Tensor]:
    """Return the sums of squares of gradients, those of experts over all ranks that have some; every rank calls.

    Args:
        parameters: whose `grad` is taken, None for one of zeros.
        groups: as `groups_of_experts` says; a parameter that is not there is the same on all ranks.
    """
    squares: dict[Any, torch.Tensor] = {}
    for one in parameters:
        # A rank has no gradient of an expert that no token entered, and is in the sum all the same.
        gradient = torch.zeros_like(one) if one.grad is None else one.grad
        group = groups.get(id(one))
        squares[group] = squares.get(group, 0.0) + gradient.detach().float().pow(2).sum()
    for group, square in squares.items():
        if group is not None:
            dist.all_reduce(square, group=group)
    return list(squares.values())
