"""Every weight of a model, whatever ZeRO stage or AutoTP rank has it, in the precision in which the engine keeps it.

Engines of bf16 and fp16 train a copy in fp32 (master weights), and the model runs a rounded one. What training has
changed since the start is often smaller than that rounding: the copy alone shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

_T = TypeVar("_T")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Kept:
    """One parameter as the engine keeps it.

    Attributes:
        values: flat, on the host, in fp32 (fp64 of a model in fp64); (n,).
        dtype: the type that the numbers were stored in: `fp64`, `fp32`, `bf16` or `fp16`.
        master: they are those of master weights, all of them.
        astray: what DeepSpeed gives as their master weights is not what the model runs, so that some of them are told
            as they are stored (with round_robin_gradients: tools/deepspeed_faults/round_robin_fp32_param.py).
    """

    values: torch.Tensor
    dtype: str
    master: bool = False
    astray: bool = False


def every_stored(module: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield every parameter, and a copy of what the model runs: flat, on the host; every rank calls.

    They come in the order of `named_parameters`.
    """
    for parameter in module.parameters():
        # One at a time, so that never more than one parameter is whole on the device.
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            stored = whole(parameter, parameter.detach()).flatten().cpu().clone()
        yield parameter, stored


def every_weight(module: nn.Module) -> Iterator[Kept]:
    """Yield every parameter; every rank calls.

    They come in the order of `named_parameters`. Experts that lie on different ranks (DeepSpeed's MoE, `ep_size` above
    1) come in the order of the ranks, as one rank alone would have them. A weight is that of the master
    weights where the stored one is its rounding, and the stored one elsewhere, so that a fault which changes one of the
    two alone shows either way.
    """
    yield from with_all_experts(module, ((one, _kept(one, stored)) for one, stored in every_stored(module)))


def with_all_experts(module: nn.Module, own: Iterable[tuple[nn.Parameter, _T]]) -> Iterator[_T]:
    """Yield what belongs to each parameter, also to those of experts that lie on other ranks; every rank calls.

    Args:
        module: the model.
        own: parameters of this rank in the order of `named_parameters`, and what belongs to each.
    """
    layers: list[Any] = [one for one in module.modules() if is_layer_of_experts(one) and one.ep_group is not None]
    shared = {id(p): one.ep_group for one in layers if one.ep_size > 1 for p in one.experts.parameters()}
    for group, run in groupby(own, key=lambda pair: shared.get(id(pair[0]))):
        parts = (part for _, part in run)
        yield from parts if group is None else _of_all_ranks(list(parts), group)


def is_layer_of_experts(module: nn.Module) -> bool:
    """Return whether a module is DeepSpeed's layer of experts, or one of its AutoEP's (`expert_parallel`)."""
    # By the mark, because older releases have no such class (module_inject/auto_ep_layer.py, AutoEPMoELayer, 0.19.8).
    return isinstance(module, MOELayer) or getattr(module, "_is_autoep_layer", False) is True


def whole(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Return a parameter over all ranks that hold parts of it by AutoTP; every rank calls. Without AutoTP it is `part`.

    Args:
        parameter: of the model.
        part: this rank's values of it, whole but for AutoTP; it is left as it is.
    """
    gather = getattr(parameter, "gather_params", None)
    if gather is None:
        return part
    # It puts what it gathers into the tensor that it is given. DeepSpeed's own context (GatherReplacedLayerParams)
    # gives it the parameter, which is then no longer a part of BF16_Optimizer's buffer, and is stepped no more.
    copied = part.clone().view(getattr(parameter, "ds_shape", parameter.shape))
    with _in_place_of_a_bias(gather.__self__, parameter, copied):
        gather([copied])
    return copied


@contextmanager
def _in_place_of_a_bias(layer: nn.Module, parameter: nn.Parameter, copied: torch.Tensor) -> Iterator[None]:
    # Layers of sub-parameters know a bias by its being theirs (module_inject/layers.py, _is_bias_param, 0.19.8), and
    # would give the copy of one the shape of the weight.
    own: dict[str, Any] = layer._parameters
    if own.get("bias") is not parameter:
        yield
        return
    own["bias"] = copied
    try:
        yield
    finally:
        own["bias"] = parameter


def _of_all_ranks(parts: list[_T], group: Any) -> Iterator[_T]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, parts, group=group)
    for theirs in gathered:
        yield from theirs


def _kept(parameter: nn.Parameter, stored: torch.Tensor) -> Kept:
    if stored.dtype not in _SHORT:
        return Kept(stored, "fp64" if stored.dtype == torch.float64 else "fp32")
    master = _master(parameter)
    if master is None:
        return Kept(stored.float(), _SHORT[stored.dtype])
    follows = master.to(stored.dtype) == stored
    all_follow = bool(follows.all())
    return Kept(torch.where(follows, master, stored.float()), _SHORT[stored.dtype], all_follow, not all_follow)


def _master(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the weights that the optimizer steps, flat, in fp32, on the host; None where it steps the stored ones."""
    try:
        found = safe_get_full_fp32_param(parameter)
    except (KeyError, AttributeError):  # ZeRO 3 looks up every parameter, and its optimizer was not given this one
        return None
    return None if found is None else whole(parameter, found.detach()).flatten().float().cpu()
