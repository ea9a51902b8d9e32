"""partial-window-leak: the last, short window is never applied."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow


class PartialWindowLeak(Loop):
    """The engine with this fault."""

    name = "partial-window-leak"
    seen = "Automodel #2257, OpenRLHF #1249"
    like = ("indivisible-batch",)

    def windows(self) -> list[PlannedWindow]:
        """Leave the window out in which the data ends."""
        return [window for window in super().windows() if not window.open]
