"""scheduler-per-outer-step: stepped once for a batch of several optimizer steps."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class SchedulerPerOuterStep(Loop):
    """The engine with this fault."""

    name = "scheduler-per-outer-step"
    seen = "verl"

    def move(self, applied: bool) -> None:
        """Move it after every other step."""
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 2 == 0:
            super().move(applied)
