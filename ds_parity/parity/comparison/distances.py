"""How far values of many steps lie apart, and which are alike. Results do not depend on how many are taken at once."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import chain

import numpy as np

from ds_parity.trace.columns import Array, WeightsColumn


def signed(reference: Array, candidate: Array, floor: float) -> Array:
    """Return (candidate - reference) / max(|reference|, floor), number by number.

    It is 0 where both are equal (infinities of one sign too), infinite where a difference has nothing to be relative
    to, and NaN where it is undefined.
    """
    with np.errstate(all="ignore"):
        difference = candidate - reference
        scale = over(reference, floor)
        relative = np.where(scale == 0, np.copysign(np.inf, difference), difference / scale)
    return np.where(reference == candidate, 0.0, relative)


def over(reference: Array, floor: float) -> Array:
    """Return what differences are relative to: max(|reference|, floor), and NaN for NaN."""
    size = np.abs(reference)
    return np.where(floor > size, floor, size)


def greatest_of_rows(values: Array) -> Array:
    """Return the greatest of each row, (n, width) to (n,): 0 of no values, NaN where one is NaN."""
    return np.asarray(values.max(axis=1, initial=0.0))


def other_bits(x: Array, y: Array) -> Array:
    """Return which floats differ in any bit: -0.0 is not 0.0."""
    return np.asarray(np.ascontiguousarray(x).view(np.int64) != np.ascontiguousarray(y).view(np.int64))


def of_weights(x: WeightsColumn, y: WeightsColumn) -> tuple[Array, Array, Array]:
    """Measure weights against weights, step by step.

    The distance is the difference of the norms, which the distance of the vectors is never below, or the sketched
    distance if that is greater, over the norm of the reference. Sketches of different lengths tell nothing.

    Returns:
        gap: the distance (>= 0, or NaN); (n,).
        nan: one of them holds NaN; (n,).
        same_width: both sketches have the same length; (n,).
    """
    pairs = list(zip(x.sketches, y.sketches, strict=True))
    same_width = np.array([len(a) == len(b) for a, b in pairs], dtype=bool)
    # math.dist and not numpy: it neither overflows nor depends on how many steps are looked at together.
    raw = np.array([math.dist(a, b) if len(a) == len(b) else math.nan for a, b in pairs], dtype=float)
    nan, equal = np.isnan(x.norms) | np.isnan(y.norms), raw == 0
    for at in np.flatnonzero(~np.isfinite(raw)).tolist():  # infinities, which can hide NaN and be equal to one another
        a, b = pairs[at]
        nan[at] |= any(map(math.isnan, chain(a, b)))
        equal[at] = all(map(operator.eq, a, b))
    norms = np.abs(signed(x.norms, y.norms, 0.0))
    with np.errstate(all="ignore"):
        relative = raw / np.sqrt(_widths(x.sketches)) / x.norms
        relative = np.where((x.norms > 0) & (x.norms < np.inf), relative, np.inf)
    return np.where(equal | ~same_width, norms, np.maximum(norms, relative)), nan, same_width


def _widths(sketches: Sequence[Sequence[float]]) -> Array:
    return np.array([len(it) for it in sketches], dtype=float)
