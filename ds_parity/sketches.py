"""What a trace says of all weights in a few numbers, from which the distance of two models follows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import nn

from ds_parity.all_weights import every_weight
from ds_parity.trace import Start

WIDTH = 32
"""Numbers of a sketch: a distance that follows from it is right to 1 / sqrt(2 * WIDTH) = 12.5 % (one sigma)."""
_AT_ONCE = 1 << 18  # so many weights are taken at once: some 20 MiB
_SHORTEST_FIRST = ("fp16", "bf16", "fp32", "fp64")


def sketch_of(parts: Iterable[torch.Tensor]) -> tuple[float, ...]:
    """Return the sketch of a vector that comes in parts, each (n,): `WIDTH` numbers (`ds_parity.trace.Weights`).

    Every weight is added to one of the numbers, with a sign, and both are drawn (count sketch, Charikar et al. 2002): a
    distance follows as well as from a full product with signs, for one addition a weight. It needs the memory of one
    part, and does not depend on how the vector is cut but for the last bits.
    """
    total, first = torch.zeros(WIDTH, dtype=torch.float64, device="cpu"), 0
    for part in parts:
        for start in range(0, len(part), _AT_ONCE):
            some = part[start : start + _AT_ONCE].double()
            places, signs = _drawn(first + start, len(some))
            total += torch.bincount(places, weights=some * signs, minlength=WIDTH)
        first += len(part)
    return tuple((total * math.sqrt(WIDTH)).tolist())


def start_of(module: nn.Module) -> Start:
    """Return the weights that a run starts from, for the header of its trace; every rank calls.

    Args:
        module: the model as an engine holds it, before its first step.
    """
    squares, types, masters, astray = 0.0, {"fp64"}, False, False

    def parts() -> Iterable[torch.Tensor]:
        nonlocal squares, masters, astray
        for one in every_weight(module):
            types.add(one.dtype)
            masters, astray = masters or one.master, astray or one.astray
            wide = one.values.double()
            squares += float(wide @ wide)
            yield one.values

    sketch = sketch_of(parts())
    # Where there are master weights, what has none is not trained: it stays as it is, which is exact in any type.
    # Those of one parameter may be taken for another's that starts alike (norms, all ones).
    dtype = "fp32" if masters and not astray else min(types, key=_SHORTEST_FIRST.index)
    return Start(norm=math.sqrt(squares), sketch=sketch, dtype=dtype)


@lru_cache(maxsize=2)
def _drawn(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places (in [0, WIDTH)) and the signs (+1 or -1) of the weights from number `first` on; (count,) each.

    They are bits of splitmix64 (Steele, Lea, Flood 2014) of the weight's number, so that none must be drawn before
    another: those of any piece of a large model follow at once, and are the same on every machine.
    """
    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device="cpu") * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    mixed = mixed ^ _shifted(mixed, 31)
    return mixed % WIDTH, (1 - 2 * ((mixed >> 32) & 1)).double()


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Return a logical shift to the right; torch's keeps the sign."""
    return (values >> by) & ((1 << (64 - by)) - 1)
