"""mean-of-micro-batches: each micro-batch's mean weighs the same, whatever it holds."""

from __future__ import annotations

import torch

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class MeanOfMicroBatches(Loop):
    """The engine with this fault."""

    name = "mean-of-micro-batches"
    seen = "open-instruct #1447, Transformers #34191, verl #5625"
    like = ("half-broadcast",)

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        """Divide by the number of micro-batches."""
        return self.an_even_share(loss)
