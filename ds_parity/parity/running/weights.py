"""All weights of a model as one vector, whatever ZeRO stage keeps them, and what a trace says of it."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import deepspeed
import torch
from torch import nn

from ds_parity.trace import Weights

_SKETCHES = 16


def vector(module: nn.Module) -> torch.Tensor:
    """Return every parameter in fp32 on the host, in the order of `named_parameters`; collective under ZeRO 3."""
    parts = []
    for parameter in module.parameters():
        # One at a time, so that never more than one parameter is whole on the device.
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            parts.append(parameter.detach().float().cpu().flatten().clone())
    return torch.cat(parts)


def summary(weights: torch.Tensor) -> Weights:
    """Return checksum, norm and sketch of a vector."""
    wide = weights.double()
    return Weights(
        checksum=hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        norm=float(wide.norm()),
        sketch=tuple((_signs(len(wide)) @ wide).tolist()),
    )


@lru_cache(maxsize=2)
def _signs(length: int) -> torch.Tensor:
    # Random signs (Achlioptas 2003): the sketch of a difference has its length, so a distance follows from two traces.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (_SKETCHES, length), generator=generator, device="cpu").mul_(2).sub_(1).double()
