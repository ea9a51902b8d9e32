"""gas-scaled-twice: divided by the total, and by gradient accumulation steps once more (`scale_wrt_gas` left on)."""

from __future__ import annotations

import torch

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class GasScaledTwice(Loop):
    """The engine with this fault."""

    name = "gas-scaled-twice"
    seen = "PipelineRL, ms-swift #10117, Transformers #45305"
    scenario = "uniform"

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        """Divide twice."""
        return super().divided(loss, batch, index) / int(self.engine.gradient_accumulation_steps())
