"""Nominal progress: where a schedule stands when it is counted in rollouts instead of in optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Units (rollouts or prompts) that entered applied optimizer steps, beside the target that makes one nominal step.

    The sum is kept whole and divided only when asked, so that 8,429 uneven steps over the data of 2,400 nominal ones
    end at exactly 2,400.
    """

    target: int
    units: int = 0

    @property
    def nominal(self) -> float:
        """Units / target: a real number >= 0."""
        return self.units / self.target

    @property
    def whole(self) -> int:
        """Nominal steps completed; the remainder is carried."""
        return self.units // self.target

    def advanced(self, units: int) -> Progress:
        """The progress after a step that was applied and contained `units`."""
        return Progress(self.target, self.units + units)
