"""step-per-pass: the optimizer is stepped on every pass."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.cut_windows import cut
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow


class StepPerPass(Loop):
    """The engine with this fault."""

    name = "step-per-pass"
    seen = "bug reports without number"
    scenario = "uniform"

    def windows(self) -> list[PlannedWindow]:
        """Make a step of every pass."""
        return cut(self.passes, self.settings, range(len(self.passes)))
