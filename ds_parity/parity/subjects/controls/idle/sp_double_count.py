"""sp-double-count: sequence-parallel peers count each micro-batch once more: windows are shorter by their number."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow, windows_of


class SpDoubleCount(Loop):
    """The engine with this fault."""

    name = "sp-double-count"
    seen = "Fast-LLM #476"
    scenario = "sharded"

    def windows(self) -> list[PlannedWindow]:
        """Count each rollout as often as ranks hold it."""
        section = {"gradient_accumulation_passes": self.settings.passes // self.wanted.sequence_parallel}
        return windows_of(self.passes, self.settings.model_copy(update=section), lookahead=True)
