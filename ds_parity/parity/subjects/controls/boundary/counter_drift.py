"""counter-drift: the engine counts passes, the loop rollouts, and their windows drift apart."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.cut_windows import cut
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow


class CounterDrift(Loop):
    """The engine with this fault."""

    name = "counter-drift"
    seen = "OpenRLHF #1337, ROLL"
    scenario = "tokens"

    def windows(self) -> list[PlannedWindow]:
        """End a window after as many passes as the first one had."""
        passes = super().windows()[0].last + 1
        return cut(self.passes, self.settings, range(passes - 1, len(self.passes), passes))
