"""nan-in-metric-reduce: one rank's NaN in a metric poisons it for all."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class NanInMetricReduce(Loop):
    """The engine with this fault."""

    name = "nan-in-metric-reduce"
    seen = "bug reports without number"

    def metrics(self, batches: list[MicroBatch]) -> dict[str, float]:
        """Add what an idle rank made of 0 / 0."""
        return {
            name: float("nan") if any(one.idle for one in batches) else value
            for name, value in super().metrics(batches).items()
        }
