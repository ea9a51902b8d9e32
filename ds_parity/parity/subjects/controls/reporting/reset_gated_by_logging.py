"""reset-gated-by-logging: window statistics are reset only when they are logged, every other step."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class ResetGatedByLogging(Loop):
    """The engine with this fault."""

    name = "reset-gated-by-logging"
    seen = "PipelineRL"
    like = ("accuracy-of-means",)

    def metrics(self, batches: list[MicroBatch]) -> dict[str, float]:
        """Keep the micro-batches of the window before."""
        kept = getattr(self, "kept", [])
        self.kept = [] if kept else batches
        return super().metrics([*kept, *batches])
