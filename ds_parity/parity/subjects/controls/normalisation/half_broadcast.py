"""half-broadcast: rollouts are corrected to the step's total over ranks, tokens are not."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class HalfBroadcast(Loop):
    """The engine with this fault."""

    name = "half-broadcast"
    seen = "a branch of Fast-LLM"
    like = ("mean-of-micro-batches",)

    def total(self, index: int) -> float:
        """Return what the total would be if every rank had as much as this one."""
        return float(sum(self.units(row[self.rank]) for row in self.rows) or 1) * self.wanted.ranks
