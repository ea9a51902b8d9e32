"""metrics-mean-of-ranks: averaged over ranks, not by weight: the loss that is logged differs, the weights do not."""

from __future__ import annotations

import torch

from ds_parity.parity.controls.loop import Loop
from ds_parity.planning.records import MicroBatch


class MetricsMeanOfRanks(Loop):
    """The engine with this fault."""

    name = "metrics-mean-of-ranks"
    seen = "open-instruct #1447"
    like = ("returned-loss-scaled",)

    def noted(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> tuple[torch.Tensor, float]:
        """Let each rank's mean weigh the same."""
        rows = self.passes[self.window.first : self.window.last + 1]
        own = sum(self.units(row[self.rank]) for row in rows)
        return loss, self.units(batch) / own * self.window.total / self.wanted.ranks

    @property
    def rank(self) -> int:
        """This rank among those that hold different micro-batches."""
        return torch.distributed.get_rank() // self.wanted.sequence_parallel
