"""metrics-mean-of-ranks: averaged over ranks, not by weight: the loss that is logged differs, the weights do not."""

from __future__ import annotations

import torch

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class MetricsMeanOfRanks(Loop):
    """The engine with this fault."""

    name = "metrics-mean-of-ranks"
    seen = "open-instruct #1447"
    like = ("returned-loss-scaled",)

    def noted(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> tuple[torch.Tensor, float]:
        """Let each rank's mean weigh the same."""
        own = sum(self.units(row[self.rank]) for row in self.rows)
        return loss, self.units(batch) / own * self.window.total / self.wanted.ranks
