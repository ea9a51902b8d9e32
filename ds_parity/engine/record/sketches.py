"""What a trace says of all weights in a few numbers, from which the distance of two models follows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import nn

from ds_parity.engine.internals.all_weights import every_weight
from ds_parity.trace import Start

WIDTH = 32
"""Numbers of a sketch: a distance that follows from it is right to 1 / sqrt(2 * WIDTH) = 12.5 % (one sigma)."""
_AT_ONCE = 1 << 16  # so many weights are multiplied at once: 16 MiB of signs
_SHORTEST_FIRST = ("fp16", "bf16", "fp32", "fp64")


def sketch_of(parts: Iterable[torch.Tensor]) -> tuple[float, ...]:
    """Return the sketch of a vector that comes in parts, each (n,): `WIDTH` numbers (`ds_parity.trace.Weights`).

    It needs the memory of one part, and does not depend on how the vector is cut but for the last bits.
    """
    total, first = torch.zeros(WIDTH, dtype=torch.float64, device="cpu"), 0
    for part in parts:
        for start in range(0, len(part), _AT_ONCE):
            some = part[start : start + _AT_ONCE].double()
            total += _signs(first + start, len(some)) @ some
        first += len(part)
    return tuple(total.tolist())


def start_of(module: nn.Module) -> Start:
    """Return the weights that a run starts from, for the header of its trace; every rank calls.

    Args:
        module: the model as an engine holds it, before its first step.
    """
    squares, types = 0.0, {"fp64"}

    def parts() -> Iterable[torch.Tensor]:
        nonlocal squares
        for part, dtype in every_weight(module):
            types.add(dtype)
            wide = part.double()
            squares += float(wide @ wide)
            yield part

    sketch = sketch_of(parts())
    return Start(norm=math.sqrt(squares), sketch=sketch, dtype=min(types, key=_SHORTEST_FIRST.index))


@lru_cache(maxsize=4)
def _signs(first: int, count: int) -> torch.Tensor:
    """Return (WIDTH, count) of +1 and -1 in fp64: those of the weights from number `first` on.

    They are bits of splitmix64 (Steele, Lea, Flood 2014) of the weight's number, so that none must be drawn before
    another: those of any piece of a large model follow at once, and are the same on every machine.
    """
    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device="cpu") * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    mixed = mixed ^ _shifted(mixed, 31)
    bits = (mixed[None] >> torch.arange(WIDTH, device="cpu")[:, None]) & 1
    return (1 - 2 * bits).double()


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Return a logical shift to the right; torch's keeps the sign."""
    return (values >> by) & ((1 << (64 - by)) - 1)
