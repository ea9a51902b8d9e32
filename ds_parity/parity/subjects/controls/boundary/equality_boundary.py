"""equality-boundary: `total == target`: a pass that overshoots jumps over it, and no step ever comes."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.cut_windows import cut
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow


class EqualityBoundary(Loop):
    """The engine with this fault."""

    name = "equality-boundary"
    seen = "PipelineRL's rule"
    scenario = "tokens"

    def windows(self) -> list[PlannedWindow]:
        """End a window where rollouts come to a multiple of the target exactly, or the data ends."""
        ends, consumed = [], 0
        for index, row in enumerate(self.passes):
            consumed += sum(batch.rollouts for batch in row)
            if consumed % self.settings.target == 0:
                ends.append(index)
        return cut(self.passes, self.settings, ends)
