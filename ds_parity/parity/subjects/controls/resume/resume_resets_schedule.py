"""resume-resets-schedule: the scheduler is built anew and not loaded: warm-up begins again."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class ResumeResetsSchedule(Loop):
    """The engine with this fault."""

    name = "resume-resets-schedule"
    seen = "a branch of Fast-LLM; load_lr_scheduler_states=False"

    def move(self, applied: bool) -> None:
        """Begin the second window with the schedule's first rate."""
        super().move(applied)
        if self.number == 1:
            self.scheduler.step(-1)
