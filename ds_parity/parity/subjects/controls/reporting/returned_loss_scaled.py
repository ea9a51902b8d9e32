"""returned-loss-scaled: the loss that backward() returned is logged, divided by gradient accumulation steps."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class ReturnedLossScaled(Loop):
    """The engine with this fault."""

    name = "returned-loss-scaled"
    seen = "DeepSpeed's return value"
    scenario = "uniform"

    def loss(self, reported: float) -> float:
        """Divide what is reported."""
        return reported / int(self.engine.gradient_accumulation_steps())
