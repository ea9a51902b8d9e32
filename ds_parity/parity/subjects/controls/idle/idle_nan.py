"""idle-nan: `loss * 0` of a NaN or inf."""

from __future__ import annotations

import torch

from ds_parity.parity.subjects.controls.loop import Loop


class IdleNan(Loop):
    """The engine with this fault."""

    name = "idle-nan"
    seen = "PipelineRL"
    scenario = "seldom"
    like = ("zero-denominator",)

    def silenced(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        """Multiply what overflowed by 0."""
        return loss * float("inf") * 0.0
