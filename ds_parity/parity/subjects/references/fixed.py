"""Reference `deepspeed`: the bare engine with its own fixed gradient_accumulation_steps, on uniform windows."""

from __future__ import annotations

from typing import Any

import deepspeed

from ds_parity.parity.running.layouts import cut_by
from ds_parity.parity.running.own_batches import Record, after_building, after_window, begin, own_batches
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import windows_of
from ds_parity.parity.subjects.references.bare import StepNotes, initialize


def run_with_fixed_steps(scenario: Scenario, record: Record) -> Any:
    """Run an unchanged DeepSpeed loop: DeepSpeed decides the boundary, divides the loss and moves the scheduler.

    With `managed_gradient_accumulation: false` the loop calls step() at the boundary only, as it must there.
    """
    # DeepSpeed before 0.19.4 does not know the key, and passes over it.
    known = hasattr(deepspeed.DeepSpeedEngine, "managed_gradient_accumulation")
    managed = not known or scenario.config.get("managed_gradient_accumulation", True)
    steps = None
    if scenario.settings.gradient_accumulation_passes is None:
        steps = cut_by(scenario.settings).passes // scenario.ranks  # DeepSpeed's own loop needs to be told how many
    engine = initialize(scenario, steps, managed=managed)
    begin(record, engine.module)
    after_building(scenario, engine)
    passes = scenario.batches()
    windows = iter(windows_of(passes, scenario.settings))
    notes = StepNotes(engine, scenario, passes)
    for number, batch in enumerate(own_batches(scenario), start=1):
        loss = engine(**batch.inputs)
        engine.backward(loss)
        notes.add(loss, batch.rollouts if scenario.settings.loss_weight != "token" else batch.tokens)
        # Unmanaged, a step() is an update whatever the number of backwards, so the loop counts them.
        if not managed and number % engine.gradient_accumulation_steps():
            continue
        # The LR of a step is the one before its scheduler moves.
        lr, steps = engine.get_lr(), engine.global_steps
        engine.step()
        # Only DeepSpeed knows here which step() was a boundary.
        if engine.global_steps != steps:
            norm, applied = engine.get_global_grad_norm(), engine.was_step_applied()
            record(notes.record(engine.global_steps, next(windows), lr, norm, applied), engine.module)
            after_window(scenario, engine)
    return engine
