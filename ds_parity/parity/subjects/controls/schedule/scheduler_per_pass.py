"""scheduler-per-pass: the scheduler is stepped on every pass.

The LR moves as many times too fast as windows have passes.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class SchedulerPerPass(Loop):
    """The engine with this fault."""

    name = "scheduler-per-pass"
    seen = "a vision-encoder trainer, PR #82; accelerate #2926"
    scenario = "uniform"

    def between(self, index: int) -> None:
        """Move it in every pass."""
        super().between(index)
        self.scheduler.step()
