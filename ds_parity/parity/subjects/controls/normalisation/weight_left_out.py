"""weight-left-out: one rank gives no weights, and its micro-batches weigh 1 each."""

from __future__ import annotations

from dataclasses import replace

from ds_parity.parity.running.layouts import Passes
from ds_parity.parity.subjects.controls.loop import Loop


class WeightLeftOut(Loop):
    """The engine with this fault."""

    name = "weight-left-out"
    seen = "a weight that is set on the first rank alone"
    scenario = "weights"

    def batches(self) -> Passes:
        """Give the last rank's micro-batches the weight 1."""
        return [[*row[:-1], replace(row[-1], weight=1.0) if row[-1].tokens else row[-1]] for row in super().batches()]
