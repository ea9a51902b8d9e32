"""last-backward-only: gradient_accumulation_steps 1, one step() after n backwards, the boundary never set.

Every backward counts as a boundary, and ZeRO 1 and 2 keep the gradients of the last. Seen in OpenRLHF's dynamic batches,
open-instruct #1498 and DeepSpeed #7981; ZeRO 0 and 3 look right.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_parity.parity.candidate import Record, own_batches, stand_in
from ds_parity.parity.oracle import plan, weight
from ds_parity.parity.references.bare import StepNotes, initialize
from ds_parity.parity.scenario import Scenario


def run(scenario: Scenario, record: Record) -> Any:
    """Run every window with its losses divided right, and its boundary never set."""
    settings, passes = scenario.settings, scenario.batches()
    engine = initialize(scenario, gradient_accumulation_steps=1)
    own, idle, notes = own_batches(scenario), stand_in(scenario), StepNotes(engine, scenario, passes)
    for number, window in enumerate(plan(passes, settings), start=1):
        for batch in own[window.first : window.last + 1]:
            units = weight(batch, settings.loss_weight)
            loss = engine(**(batch if units else idle).inputs)
            if units:
                notes.add(loss, units)
            share = torch.distributed.get_world_size() * units
            engine.backward(loss / (window.total / share) if units else loss * 0.0)
        lr = engine.get_lr()
        engine.step()
        record(notes.record(number, window, lr, engine.get_global_grad_norm(), True), engine.module)
    return engine
