"""sequences-as-prompts: sequences are counted where the target is one of prompts.

The number of steps grows with the solutions, or turns, of each prompt.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import PlannedWindow, windows_of


class SequencesAsPrompts(Loop):
    """The engine with this fault."""

    name = "sequences-as-prompts"
    seen = "SkyRL #1483"
    scenario = "prompts"

    def windows(self) -> list[PlannedWindow]:
        """Count rollouts towards a target of prompts."""
        return windows_of(self.passes, self.settings.model_copy(update={"count": "rollout"}), lookahead=True)
