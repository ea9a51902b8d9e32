"""idle-counted: dummies are in the denominator: too small by real / (real + dummy)."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class IdleCounted(Loop):
    """The engine with this fault."""

    name = "idle-counted"
    seen = "PipelineRL's lag metric, SkyRL"

    def total(self, index: int) -> float:
        """Count what the stand-ins hold."""
        dummies = sum(batch.idle for row in self.rows for batch in row)
        return self.window.total + dummies * self.units(self.idle)
