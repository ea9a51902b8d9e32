"""local-count: each rank compares its own count with the global target.

Windows are as many times too long as there are ranks.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow, windows_of


class LocalCount(Loop):
    """The engine with this fault."""

    name = "local-count"
    seen = "verl #6176's kin"
    scenario = "uniform"

    def windows(self) -> list[PlannedWindow]:
        """Wait for as many targets as there are ranks."""
        longer = self.settings.model_copy(
            update={"gradient_accumulation_passes": self.settings.passes * self.wanted.ranks}
        )
        return windows_of(self.passes, longer, lookahead=True)
