"""boundary-off-by-one: `micro_step % n == 0`, tested before the pass is counted.

The first step is made of one pass, and every other one is shifted.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.cut_windows import cut
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow


class BoundaryOffByOne(Loop):
    """The engine with this fault."""

    name = "boundary-off-by-one"
    seen = "a vision-encoder trainer, PR #82"
    scenario = "uniform"

    def windows(self) -> list[PlannedWindow]:
        """End every window a pass late, but for a first one of a single pass."""
        last = [0, *(window.last + 1 for window in super().windows())]
        return cut(self.passes, self.settings, [end for end in last if end < len(self.passes)])
