"""scheduler-on-skipped-step: the LR moves with a step that was not taken: an overflow, an empty window."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class SchedulerOnSkippedStep(Loop):
    """The engine with this fault."""

    name = "scheduler-on-skipped-step"
    seen = "ROLL"
    scenario = "hollow"

    def move(self, applied: bool) -> None:
        """Move it in any case."""
        super().move(True)
