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
            tuple(held[: max(1, len(held) // 2 * 2)] if held else () for held in row) for row in self.wanted.layout()
        )
        return collate_layout(tuple(even))
