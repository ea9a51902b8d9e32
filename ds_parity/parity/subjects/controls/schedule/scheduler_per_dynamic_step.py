"""scheduler-per-dynamic-step: one scheduler step for each update.

There are more updates, or fewer, than the nominal ones that the budget was made for.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class SchedulerPerDynamicStep(Loop):
    """The engine with this fault."""

    name = "scheduler-per-dynamic-step"
    seen = "ROLL #442 (8,429 updates, a budget of 2,400)"
    scenario = "progress"

    def move(self, applied: bool) -> None:
        """Move it by a step, whatever the window contained."""
        if applied:
            self.scheduler.step()
