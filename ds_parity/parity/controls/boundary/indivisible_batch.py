"""indivisible-batch: rollouts that are no multiple of the batch are dropped at the end ('3509 and 640')."""

from __future__ import annotations

from ds_parity.parity.controls.loop import Loop
from ds_parity.parity.oracle import PlannedWindow


class IndivisibleBatch(Loop):
    """The engine with this fault."""

    name = "indivisible-batch"
    seen = "SkyRL #1483, open-instruct, TRL"
    like = ("partial-window-leak",)

    def windows(self) -> list[PlannedWindow]:
        """Drop the tail: the window that it leaves short."""
        return [window for window in super().windows() if not window.open]
