"""sum-over-ranks: losses that each rank has divided by its own share are added up over ranks, and not averaged.

The gradient is too large by exactly the number of ranks.
"""

from __future__ import annotations

from dataclasses import replace

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow


class SumOverRanks(Loop):
    """The engine with this fault."""

    name = "sum-over-ranks"
    seen = "losses of the convention of DDP and of the Hugging Face Trainer, multiplied by the ranks, in a sum"
    scenario = "averaged"

    def windows(self) -> list[PlannedWindow]:
        """Divide by 1, as for a denominator of all ranks."""
        return [replace(window, total=1.0) if window.total else window for window in super().windows()]
