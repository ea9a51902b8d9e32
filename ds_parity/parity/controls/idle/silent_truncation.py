"""silent-truncation: rollouts are dropped to make a batch divisible."""

from __future__ import annotations

import torch

from ds_parity.collation import to_device
from ds_parity.parity.controls.loop import Loop
from ds_parity.parity.layouts import collate_layout
from ds_parity.parity.references.bare import StepNotes
from ds_parity.parity.scenario import Scenario


class SilentTruncation(Loop):
    """The engine with this fault."""

    name = "silent-truncation"
    seen = "open-instruct, TRL"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.passes = collate_layout(
            tuple(tuple(held[: max(1, len(held) // 2 * 2)] if held else () for held in row) for row in wanted.layout())
        )
        rank = torch.distributed.get_rank() // wanted.sequence_parallel
        self.own = [to_device(row[rank], self.engine.device) for row in self.passes]
        self.notes = StepNotes(self.engine, wanted, self.passes)
