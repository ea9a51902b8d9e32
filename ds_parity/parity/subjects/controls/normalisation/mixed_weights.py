"""mixed-weights: a share of tokens on a mean over sequences."""

from __future__ import annotations

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.controls.loop import Loop


class MixedWeights(Loop):
    """The engine with this fault."""

    name = "mixed-weights"
    seen = "verl #5625"
    like = ("unmasked-numerator",)

    def of_engine(self) -> Scenario:
        """Build a loss that is a mean over rollouts."""
        return self.configured(ds_parity={**self.wanted.config["ds_parity"], "loss_weight": "rollout"})
