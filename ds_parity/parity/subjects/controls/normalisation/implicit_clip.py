"""implicit-clip: no `gradient_clipping` key: DeepSpeed clips at 1.0 since 0.19.1, and did not before."""

from __future__ import annotations

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.controls.loop import Loop


class ImplicitClip(Loop):
    """The engine with this fault."""

    name = "implicit-clip"
    seen = "DeepSpeed #8068"
    scenario = "unclipped"
    like = ("clip-at-wrong-scale",)

    def of_engine(self) -> Scenario:
        """Clip where nobody asked for it."""
        return self.configured(gradient_clipping=1.0)
