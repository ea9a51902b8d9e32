"""sticky-boundary: the flag of the last boundary still stands in the next window's first pass.

ZeRO 1 and 2 then lose that pass.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class StickyBoundary(Loop):
    """The engine with this fault."""

    name = "sticky-boundary"
    seen = "accelerate's users, PipelineRL"
    stages = (1, 2)

    def marks(self, index: int) -> bool:
        """Leave the flag as it was for one pass."""
        return super().marks(index) or (index > 0 and index == self.window.first)

    def between(self, index: int) -> None:
        """Step at the end of the window only."""
