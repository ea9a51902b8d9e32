"""last-backward-only: gradient accumulation 1 and the boundary never set: ZeRO 1 and 2 keep the last backward alone."""

from __future__ import annotations

from typing import ClassVar

from ds_parity.parity.subjects.controls.loop import Loop


class LastBackwardOnly(Loop):
    """The engine with this fault."""

    name = "last-backward-only"
    seen = "OpenRLHF's dynamic batches, open-instruct #1498, DeepSpeed #7981"
    stages = (1, 2)
    accumulation_steps = 1
    like: ClassVar[tuple[str, ...]] = ("mid-window-checkpoint",)

    def marks(self, index: int) -> bool:
        """Say boundary at every pass, as gradient accumulation 1 does."""
        return True

    def between(self, index: int) -> None:
        """Step at the end of the window only."""
