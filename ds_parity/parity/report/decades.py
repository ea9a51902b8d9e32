"""A logarithmic axis that has a place for 0 at its foot and one for NaN and infinity at its top."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TICKS = 8


@dataclass(frozen=True)
class Decades:
    """Powers of ten from `low` to `high`; both None where all that is drawn is 0.

    Calling it turns values into heights: their logarithm, and for 0 one decade (of a long axis: more) below the lowest.
    """

    low: int | None
    high: int | None

    @classmethod
    def over(cls, *values: NDArray[Any]) -> Decades:
        """Return the axis that holds all of some values, each finite and not negative."""
        known = np.concatenate(values)
        known = known[known > 0]
        if not len(known):
            return cls(None, None)
        low, high = math.floor(math.log10(known.min())), math.ceil(math.log10(known.max()))
        return cls(low, max(high, low + 1))

    @property
    def foot(self) -> float:
        """The height of 0."""
        return 0.0 if self.low is None else self.low - self._margin

    @property
    def top(self) -> float:
        """The height of what is no number."""
        return 1.0 if self.high is None else self.high + self._margin

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return heights."""
        height = np.full(len(values), self.foot)
        positive = values > 0
        height[positive] = np.log10(values[positive])
        return height

    def ticks(self, *, with_top: bool) -> dict[float, str]:
        """Return the labels of the axis by height; one for what is no number where it is asked for."""
        ticks = {self.foot: "0"}
        if self.low is not None and self.high is not None:
            every = max(1, math.ceil((self.high - self.low) / _TICKS))
            ticks |= {float(power): f"1e{power:+03d}" for power in range(self.low, self.high + 1, every)}
        return ticks | ({self.top: "NaN, inf,\nabsent"} if with_top else {})

    def limits(self, *, with_top: bool) -> tuple[float, float]:
        """Return the ends of the axis."""
        pad = 0.5 * self._margin
        return self.foot - pad, (self.top if with_top or self.high is None else self.high) + pad

    def put_on(self, axes: Any, *, with_top: bool) -> None:
        """Give an axes its limits, ticks and the line of 0; and the line of what is no number where it is asked for."""
        ticks = self.ticks(with_top=with_top)
        for height in (self.top, self.foot) if with_top else (self.foot,):
            axes.axhline(height, color="#B0B0B0", linewidth=0.8, zorder=0.4)
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.set_ylim(*self.limits(with_top=with_top))

    @property
    def _margin(self) -> float:
        return 1.0 if self.low is None or self.high is None else max(1.0, 0.12 * (self.high - self.low))
