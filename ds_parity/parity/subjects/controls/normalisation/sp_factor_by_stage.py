"""sp-factor-by-stage: ZeRO 3 averages over sequence-parallel ranks too, other stages do not.

One factor for all stages is off by the number of those ranks, on stage 3 alone.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class SpFactorByStage(Loop):
    """The engine with this fault."""

    name = "sp-factor-by-stage"
    seen = "tmax #9"
    scenario = "sharded"
    stages = (3,)

    def averaged(self) -> float:
        """Do on stage 3 as on the others."""
        return self.wanted.ranks / self.wanted.sequence_parallel
