"""Every weight of a model, whatever ZeRO stage or AutoTP rank has it, in the precision in which the engine keeps it.

Engines of bf16 and fp16 train a copy in fp32 (master weights), and the model runs a rounded one. What training has
changed since the start is often smaller than that rounding: the copy alone shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

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
            stored = _whole(parameter, parameter.detach()).flatten().cpu().clone()
        yield parameter, stored


def every_weight(module: nn.Module) -> Iterator[Kept]:
    """Yield every parameter; every rank calls.

    They come in the order of `named_parameters`. A weight is that of the master
    weights where the stored one is its rounding, and the stored one elsewhere, so that a fault which changes one of the
    two alone shows either way.
    """
    for parameter, stored in every_stored(module):
        if stored.dtype not in _SHORT:
            yield Kept(stored, "fp64" if stored.dtype == torch.float64 else "fp32")
            continue
        master = _master(parameter)
        if master is None:
            yield Kept(stored.float(), _SHORT[stored.dtype])
            continue
        follows = master.to(stored.dtype) == stored
        all_follow = bool(follows.all())
        yield Kept(torch.where(follows, master, stored.float()), _SHORT[stored.dtype], all_follow, not all_follow)


def _master(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the weights that the optimizer steps, flat, in fp32, on the host; None where it steps the stored ones."""
    try:
        whole = safe_get_full_fp32_param(parameter)
    except (KeyError, AttributeError):  # ZeRO 3 looks up every parameter, and its optimizer was not given this one
        return None
    return None if whole is None else _whole(parameter, whole.detach()).flatten().float().cpu()


def _whole(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Return a parameter over all ranks that hold parts of it by AutoTP; without AutoTP, the part is the whole.

    Args:
        parameter: of the model.
        part: this rank's values of it, whole but for AutoTP.
    """
    gather = getattr(parameter, "gather_params", None)
    if gather is None:
        return part
    # It puts what it gathers into the tensor that it is given. DeepSpeed's own context (GatherReplacedLayerParams)
    # gives it the parameter, which is then no longer a part of BF16_Optimizer's buffer, and is stepped no more.
    copied = part.clone().view(getattr(parameter, "ds_shape", parameter.shape))
    gather([copied])
    return copied
