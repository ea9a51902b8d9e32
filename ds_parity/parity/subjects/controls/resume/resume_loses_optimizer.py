"""resume-loses-optimizer: weights come back, momentum does not: the same gradient makes another update."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.references.private_state import lose_optimizer_state


class ResumeLosesOptimizer(Loop):
    """The engine with this fault."""

    name = "resume-loses-optimizer"
    seen = "load_optimizer_states=False, or module weights loaded alone"
    scenario = "clipped"

    def move(self, applied: bool) -> None:
        """Begin the third window with a fresh optimizer."""
        super().move(applied)
        if self.number == 2:
            lose_optimizer_state(self.engine)
