"""Numbers that both traces rounded to one grid, and how many of them rounding can explain to differ.

Two numbers that lie less than a unit apart round to the same place of a grid, unless a half of its unit lies between
them: then to neighbours. That is rare where they lie much nearer than a unit, as their bound says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ds_parity.parity.comparison.fields import Difference
from ds_parity.trace.columns import Array

_LEAST = math.log(1e-4)  # of more improbable counts, rounding is no explanation


@dataclass(slots=True)
class Crossings:
    """The steps in which both numbers of a field lie on one grid.

    They are counted by step and by distinct pair of numbers. A loss that no longer moves may lie at a half in every
    step, which is one pair; one that moves slowly passes each half in several pairs, but in few of its steps.
    """

    steps: int = 0
    apart: int = 0
    expected: float = 0.0
    pairs: dict[tuple[float, float], float] = field(default_factory=dict)

    def add(self, x: Array, y: Array, bound: Array, unit: Array, apart: Array) -> None:
        """Add n steps.

        Args:
            x: of the reference.
            y: of the candidate.
            bound: how far the numbers may lie apart before they are rounded, relative.
            unit: of the grid, relative to the same.
            apart: they were rounded to other places.
        """
        chances = [min(1.0, one / of) if of > 0 else 1.0 for one, of in zip(bound.tolist(), unit.tolist(), strict=True)]
        for a, b, chance in zip(x.tolist(), y.tolist(), chances, strict=True):
            self.steps += 1
            self.expected += chance
            self.pairs[a, b] = max(chance, self.pairs.get((a, b), 0.0))
        self.apart += int(apart.sum())

    def difference(self, name: str) -> Difference | None:
        """What is more than rounding explains, or None."""
        differing = sum(a != b for a, b in self.pairs)
        if _explained(self.apart, self.expected) or _explained(differing, sum(self.pairs.values())):
            return None
        why = (
            f"{name} was rounded alike in both traces, and numbers as near as their bound differ then in "
            f"{self.expected:.2g} of {self.steps} steps, but these in {self.apart}"
        )
        a, b = next((a, b) for a, b in self.pairs if a != b)
        return Difference(None, f"{name}, rounded", a, b, self.apart / self.steps, self.expected / self.steps, why)


def _explained(count: int, expected: float) -> bool:
    """Whether so many of rare events may be chance: expected^count / count! is no less than their probability."""
    if not count:
        return True
    return expected > 0 and count * math.log(expected) - math.lgamma(count + 1) > _LEAST
