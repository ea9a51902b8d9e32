"""resume-repeats-data: the data loader begins again: what was trained on is trained on once more, the rest never."""

from __future__ import annotations

from ds_parity.parity.running.layouts import Passes
from ds_parity.parity.subjects.controls.loop import Loop


class ResumeRepeatsData(Loop):
    """The engine with this fault."""

    name = "resume-repeats-data"
    seen = "trainers that save no position in the data"
    scenario = "uniform"

    def batches(self) -> Passes:
        """Take the first half of the data twice."""
        passes = super().batches()
        half = len(passes) // 2
        return [*passes[:half], *passes[:half]]
