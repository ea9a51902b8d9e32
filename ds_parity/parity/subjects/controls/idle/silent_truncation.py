"""silent-truncation: rollouts are dropped to make a batch divisible."""

from __future__ import annotations

from ds_parity.parity.running.layouts import Passes, collate_layout
from ds_parity.parity.subjects.controls.loop import Loop


class SilentTruncation(Loop):
    """The engine with this fault."""

    name = "silent-truncation"
    seen = "open-instruct, TRL"

    def batches(self) -> Passes:
        """Drop the odd rollout of each micro-batch."""
        even = (
            tuple(cell[: max(1, len(cell) // 2 * 2)] if cell else () for cell in row) for row in self.wanted.layout()
        )
        return collate_layout(tuple(even))
