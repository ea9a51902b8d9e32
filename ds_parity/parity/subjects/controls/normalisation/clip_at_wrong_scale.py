"""clip-at-wrong-scale: clipped before the gradient is corrected, so at another norm than was asked for."""

from __future__ import annotations

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.controls.loop import Loop


class ClipAtWrongScale(Loop):
    """The engine with this fault."""

    name = "clip-at-wrong-scale"
    seen = "recipes with 76.8 for 0.3 x 256"
    scenario = "clipped"
    like = ("implicit-clip",)

    def of_engine(self) -> Scenario:
        """Clip a gradient that is as many times too large as there are ranks."""
        return self.configured(gradient_clipping=self.wanted.config["gradient_clipping"] / self.wanted.ranks)
