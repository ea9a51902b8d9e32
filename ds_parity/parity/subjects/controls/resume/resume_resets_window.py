"""resume-resets-window: the surplus is not restored: from the resume on, windows are counted from 0."""

from __future__ import annotations

from dataclasses import replace

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow, windows_of


class ResumeResetsWindow(Loop):
    """The engine with this fault."""

    name = "resume-resets-window"
    seen = "a branch of Fast-LLM"

    def windows(self) -> list[PlannedWindow]:
        """Resume after the second window."""
        before = super().windows()[:2]
        start = before[-1].last + 1
        after = windows_of(self.passes[start:], self.settings, lookahead=True)
        return before + [replace(w, first=w.first + start, last=w.last + start) for w in after]
