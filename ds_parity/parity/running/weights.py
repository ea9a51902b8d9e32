"""All weights of a model as one vector, whatever ZeRO stage keeps them, and what a trace says of it."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from ds_parity.all_weights import every_stored, every_weight, with_all_experts
from ds_parity.sketches import sketch_of
from ds_parity.trace import Weights


def vector(module: nn.Module) -> torch.Tensor:
    """Return every parameter in fp32 on the host, in the order of `every_weight`; every rank calls."""
    return torch.cat([stored.float() for stored in with_all_experts(module, every_stored(module))])


def trained(module: nn.Module) -> torch.Tensor:
    """Return every parameter as `vector` does, in fp32 from the master weights where the engine keeps them."""
    return torch.cat([one.values.float() for one in every_weight(module)])


def summary(weights: torch.Tensor) -> Weights:
    """Return checksum, norm and sketch of a vector."""
    return Weights(
        checksum=hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        norm=float(weights.double().norm()),
        sketch=sketch_of([weights]),
    )
