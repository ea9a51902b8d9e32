"""zero-denominator: 0 / 0 in a micro-batch without tokens."""

from __future__ import annotations

import torch

from ds_parity.parity.subjects.controls.loop import Loop


class ZeroDenominator(Loop):
    """The engine with this fault."""

    name = "zero-denominator"
    seen = "OLMo-core #657, Automodel #3796"
    scenario = "seldom"
    like = ("idle-nan",)

    def silenced(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        """Divide by the tokens that are not there."""
        return loss * 0.0 / loss.new_zeros(())
