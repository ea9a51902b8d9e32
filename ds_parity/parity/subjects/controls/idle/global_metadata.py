"""global-metadata: the whole batch's metadata on each micro-batch, so that rows take others' advantages."""

from __future__ import annotations

from dataclasses import replace

import torch

from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.planning.rollout import MicroBatch


class GlobalMetadata(Loop):
    """The engine with this fault."""

    name = "global-metadata"
    seen = "SkyRL #1483, review; ROLL"
    like = ("shared-padding", "data-or-seed")

    def inputs(self, index: int) -> MicroBatch:
        """Give the rows the advantages of the whole run's first rows."""
        batch = super().inputs(index)
        first = torch.cat([one.inputs["advantages"] for one in self.own if not one.idle])
        return replace(batch, inputs={**batch.inputs, "advantages": first[: len(batch.inputs["advantages"])]})
