"""aux-term-scaled-apart: a second term of the loss (KL, entropy, router) is divided by another total."""

from __future__ import annotations

import torch

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class AuxTermScaledApart(Loop):
    """The engine with this fault."""

    name = "aux-term-scaled-apart"
    seen = "SkyRL"
    like = ("mean-of-micro-batches",)

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        """Take a quarter of the loss for the second term, and weigh each micro-batch of it alike."""
        return 0.75 * super().divided(loss, batch, index) + 0.25 * self.an_even_share(loss)
