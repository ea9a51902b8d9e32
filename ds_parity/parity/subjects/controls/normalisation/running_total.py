"""running-total: divided by the total so far: early passes weigh too much."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class RunningTotal(Loop):
    """The engine with this fault."""

    name = "running-total"
    seen = "what Fast-LLM #520 is there to avoid"

    def total(self, index: int) -> float:
        """Return what the window holds up to this pass."""
        rows = self.passes[self.window.first : index + 1]
        return float(sum(self.units(batch) for row in rows for batch in row))
