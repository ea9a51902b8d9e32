"""late-boundary: the flag is set before step() and not before the last backward.

On ZeRO 0 nothing is reduced, and the weights of the ranks fall out of sync.
"""

from __future__ import annotations

from ds_parity.parity.running.own_batches import Record
from ds_parity.parity.subjects.controls.loop import Loop


class LateBoundary(Loop):
    """The engine with this fault."""

    name = "late-boundary"
    seen = "measured; ZeRO 1 and 2 raise a KeyError, 3 works"
    stages = (0,)

    def marks(self, index: int) -> bool:
        """Never before a backward."""
        return False

    def close(self, number: int, record: Record) -> None:
        """Set the flag now."""
        self.engine.set_gradient_accumulation_boundary(self.window.total > 0)
        super().close(number, record)
