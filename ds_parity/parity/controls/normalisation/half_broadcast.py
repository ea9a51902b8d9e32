"""half-broadcast: rollouts are corrected to the step's total over ranks, tokens are not."""

from __future__ import annotations

import torch

from ds_parity.parity.controls.loop import Loop


class HalfBroadcast(Loop):
    """The engine with this fault."""

    name = "half-broadcast"
    seen = "a branch of Fast-LLM"
    like = ("mean-of-micro-batches",)

    def total(self, index: int) -> float:
        """Return what the first rank would hold if all held as much."""
        rows = self.passes[self.window.first : self.window.last + 1]
        return float(sum(self.units(row[self.rank]) for row in rows) or 1) * self.wanted.ranks

    @property
    def rank(self) -> int:
        """This rank among those that hold different micro-batches."""
        return torch.distributed.get_rank() // self.wanted.sequence_parallel
