"""wrong-window: divided by the total of the window before, or of the whole generation batch."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class WrongWindow(Loop):
    """The engine with this fault."""

    name = "wrong-window"
    seen = "TRL #5619"

    def total(self, index: int) -> float:
        """Return the total of the window before."""
        before = [window.total for window in self.windows() if window.last < self.window.first]
        return before[-1] if before else self.window.total
