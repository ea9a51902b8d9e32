"""accuracy-of-means: a metric computed from the means of micro-batches, not as the mean of samples."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.references.bare import metrics_of
from ds_parity.planning.rollout import MicroBatch


class AccuracyOfMeans(Loop):
    """The engine with this fault."""

    name = "accuracy-of-means"
    seen = "open-instruct #1447, review"
    like = ("reset-gated-by-logging",)

    def metrics(self, batches: list[MicroBatch]) -> dict[str, float]:
        """Average the micro-batches' means."""
        means = [metrics_of([batch])["reward"] for batch in batches if not batch.idle]
        return {"reward": sum(means) / len(means)}
