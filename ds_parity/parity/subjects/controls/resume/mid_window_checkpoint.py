"""mid-window-checkpoint: saved between passes: counters come back, gradients do not."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.references.private_state import lose_gradients


class MidWindowCheckpoint(Loop):
    """The engine with this fault."""

    name = "mid-window-checkpoint"
    seen = "everyone"
    like = ("last-backward-only", "sticky-boundary")

    def between(self, index: int) -> None:
        """Lose, as a resume does, what the second window has accumulated up to its middle."""
        super().between(index)
        if self.number == 2 and index == (self.window.first + self.window.last) // 2:
            lose_gradients(self.engine)
