"""mid-window-checkpoint: saved between passes: counters come back, gradients do not."""

from __future__ import annotations

from ds_parity.engine.normalize import discard_accumulated
from ds_parity.parity.controls.loop import Loop
from ds_parity.parity.oracle import PlannedWindow


class MidWindowCheckpoint(Loop):
    """The engine with this fault."""

    name = "mid-window-checkpoint"
    seen = "everyone"
    like = ("last-backward-only", "sticky-boundary")

    def between(self, index: int) -> None:
        """Lose, as a resume does, what the second window's first pass has accumulated."""
        super().between(index)
        if self.number_of(self.window) == 1 and index == self.window.first:
            discard_accumulated(self.engine)

    def number_of(self, window: PlannedWindow) -> int:
        """Return how many windows are before it."""
        return [one.first for one in self.windows()].index(window.first)
