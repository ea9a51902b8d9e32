"""unmasked-numerator: masked tokens stay in the numerator and are not in the denominator."""

from __future__ import annotations

from dataclasses import replace

import torch

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class UnmaskedNumerator(Loop):
    """The engine with this fault."""

    name = "unmasked-numerator"
    seen = "ROLL"
    like = ("mixed-weights",)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.engine.module.reduce = self.unmasked

    def inputs(self, index: int) -> MicroBatch:
        """Mark every token for the loss, and remember how many there should be."""
        batch = super().inputs(index)
        self.tokens = batch.inputs["loss_mask"].sum()
        return replace(batch, inputs={**batch.inputs, "loss_mask": torch.ones_like(batch.inputs["loss_mask"])})

    def unmasked(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Sum over all tokens, divide by those with a loss."""
        total: torch.Tensor = losses.sum() / self.tokens.clamp(min=1)
        return total
