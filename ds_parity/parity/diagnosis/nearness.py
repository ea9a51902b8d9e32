"""When numbers of two traces are alike, and in how many digits rules tell them."""

from __future__ import annotations

import math


def near(value: float | None, other: float, relative: float = 0.02) -> bool:
    """Whether two numbers are alike; never for None, NaN or infinity."""
    return value is not None and abs(value - other) <= relative * abs(other)


def told(factor: float) -> str:
    """A factor in five digits, or in as many as tell it from 1."""
    digits = next((some for some in range(5, 17) if float(f"{factor:.{some}g}") != 1.0 or factor == 1.0), 17)
    return f"{factor:.{digits}g}"


def alike(values: list[float], relative: float = 0.03) -> bool:
    """Whether there are numbers, and all are near their median."""
    if not values:
        return False
    median = sorted(values)[len(values) // 2]
    return all(near(value, median, relative) for value in values)


def finite_ratio(reference: object, candidate: object) -> float | None:
    """Return candidate / reference; None where one is no float, the reference is 0, or it is not finite."""
    if not isinstance(reference, float) or not isinstance(candidate, float) or not reference:
        return None
    ratio = candidate / reference
    return ratio if math.isfinite(ratio) else None
