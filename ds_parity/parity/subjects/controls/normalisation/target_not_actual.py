"""target-not-actual: divided by the target though the window overshot."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class TargetNotActual(Loop):
    """The engine with this fault."""

    name = "target-not-actual"
    seen = "bug reports without number"
    scenario = "rollouts"

    def total(self, index: int) -> float:
        """Return the target."""
        return float(self.settings.target)
