"""mixed-weights: a share of tokens on a mean over sequences."""

from __future__ import annotations

from dataclasses import replace

from ds_parity.parity.controls.loop import Loop
from ds_parity.parity.scenario import Scenario


class MixedWeights(Loop):
    """The engine with this fault."""

    name = "mixed-weights"
    seen = "verl #5625"
    like = ("unmasked-numerator",)

    def of_engine(self) -> Scenario:
        """Build a loss that is a mean over rollouts."""
        section = {**self.wanted.config["ds_parity"], "loss_weight": "rollout"}
        return replace(self.wanted, config={**self.wanted.config, "ds_parity": section})
