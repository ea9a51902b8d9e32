"""scheduler-per-dynamic-step: one scheduler step an update, of which there are more, or fewer, than the nominal ones the budget was made for."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class SchedulerPerDynamicStep(Loop):
    """The engine with this fault."""

    name = "scheduler-per-dynamic-step"
    seen = "ROLL #442 (8,429 updates, a budget of 2,400)"
    scenario = "progress"

    def move(self, applied: bool) -> None:
        """Move it by a step, whatever the window held."""
        if applied:
            self.scheduler.step()
