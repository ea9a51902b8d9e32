"""When two learning rates are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from ds_parity.parity.diagnosis.nearness import near

SAME = 1e-6
"""Learning rates are computed, not measured: what is the same differs by rounding alone."""

MOST = 64
"""Times that a scheduler may move in one step, and steps that it may be off."""

_MOST = 1e100  # sums of rates, and of their products, are finite below it


def finite(rates: Iterable[float]) -> bool:
    """Whether rates are numbers with which one can compute."""
    return bool((np.abs(np.array(list(rates))) < _MOST).all())


def same(value: float, other: float) -> bool:
    """Whether two rates differ by rounding alone."""
    return near(value, other, SAME)


def equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether as many rates differ by rounding alone."""
    return len(one) == len(other) and all(same(y, x) for x, y in zip(one, other, strict=True))


def rests_within(rates: Sequence[float]) -> list[int]:
    """Return the steps behind which a schedule stays for one at the same rate; at its end it rests for good."""
    moves = [not same(*pair) for pair in pairwise(rates)]
    last = max((at for at, moved in enumerate(moves) if moved), default=0)
    return [at for at, moved in enumerate(moves[:last]) if not moved]


def as_fp32(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether rates are others, not all of them equal, rounded to fp32; which are rounded is not asked."""
    a, b = np.array(one, dtype=np.float64), np.array(other, dtype=np.float64)
    if np.array_equal(a, b):
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(a.astype(np.float32), b) or np.array_equal(b.astype(np.float32), a)


def follows(due: Iterable[float], rates: Iterable[float]) -> bool:
    """Whether rates are those that are due, as far as the shorter goes; what is behind another one isn't computed."""
    return all(same(y, x) for x, y in zip(due, rates, strict=False))


def digits_of(value: float, other: float) -> int:
    """Return in how many digits two numbers are shown: four, or as many as tell them apart."""
    return next((some for some in range(4, 17) if value == other or f"{value:.{some}g}" != f"{other:.{some}g}"), 17)


def where_due(value: float, due: float) -> str:
    """Return two rates in words, of which the second was due."""
    digits = digits_of(value, due)
    return f"{value:.{digits}g}, where {due:.{digits}g} was due"


def tells(values: Sequence[float]) -> bool:
    """Whether rates say where in a schedule they stand: two that are alike may be anywhere."""
    return len(set(values)) > 2
