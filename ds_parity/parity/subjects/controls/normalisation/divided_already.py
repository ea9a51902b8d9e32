"""divided-already: the caller has divided every loss by the step's total, and the engine divides by it once more.

Norm and loss are too small by the total of each window.
"""

from __future__ import annotations

import torch

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class DividedAlready(Loop):
    """The engine with this fault."""

    name = "divided-already"
    seen = "losses as TRL, open-instruct and OpenRLHF normalise them, DeepSpeed #7439"

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        """Divide twice."""
        return super().divided(loss, batch, index) / self.window.total

    def noted(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> tuple[torch.Tensor, float]:
        """Report the loss that went in."""
        return loss / self.window.total, self.units(batch)
