"""Reference `deepspeed-loop`: the bare engine with a moving boundary, driven by hand as RL trainers write it.

It knows all counts beforehand. It shares no code with the engine under test; the division, the boundary, the correction
and the scheduler's position are written out here once more.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from ds_parity.errors import ConfigError
from ds_parity.parity.candidate import Record, own_batches, stand_in
from ds_parity.parity.oracle import PlannedWindow, plan, weight
from ds_parity.parity.references.bare import StepNotes, initialize
from ds_parity.parity.references.plain import ByHand
from ds_parity.parity.scenario import Scenario
from ds_parity.planning.records import MicroBatch


def run(scenario: Scenario, record: Record) -> Any:
    """Run the scenario with `set_gradient_accumulation_boundary` before every backward."""
    settings = scenario.settings
    engine = initialize(scenario)
    passes, own = scenario.batches(), own_batches(scenario)
    idle, notes = stand_in(scenario), StepNotes(engine, scenario, passes)
    by_hand = _take_scheduler(engine) if settings.lr_progress == "rollout" else None
    windows, reached = plan(passes, settings, lookahead=_looks_ahead(scenario)), Fraction(0)
    if _looks_ahead(scenario) and max(w.last - w.first for w in windows) >= settings.lookahead:
        raise ConfigError("deepspeed-loop knows the totals of whole windows: ds_parity.lookahead must hold the longest")
    for number, window in enumerate(windows, start=1):
        for index in range(window.first, window.last + 1):
            engine.set_gradient_accumulation_boundary(index == window.last and window.total > 0)
            _backward(engine, own[index], idle, window, scenario, notes)
            if index < window.last:
                engine.step()
        lr = engine.get_lr()
        norm, applied = _step(engine, window)
        if by_hand is not None and applied:
            by_hand.advance(window.progress - reached)
        reached = window.progress
        record(notes.record(number, window, lr, norm, applied), engine.module)
    return engine


def _looks_ahead(scenario: Scenario) -> bool:
    return scenario.settings.lookahead > 0 and scenario.drive == "passes"


def _backward(
    engine: Any, batch: MicroBatch, idle: MicroBatch, window: PlannedWindow, scenario: Scenario, notes: StepNotes
) -> None:
    settings = scenario.settings
    units = weight(batch, settings.loss_weight)
    loss = engine(**(batch if batch.rollouts else idle).inputs)
    if units == 0:
        engine.backward(loss * 0.0, scale_wrt_gas=False)
        return
    notes.add(loss, units)
    averaged: float = scenario.ranks if engine.gradient_average else 1
    if engine.zero_optimization_stage() < 3:
        # Gathered losses sum to so many times their gradient, and only ZeRO 3 averages over all who hold them.
        averaged /= scenario.sequence_parallel
    share = averaged if settings.loss_reduction == "sum" else averaged * units
    engine.backward(loss / (window.expected / share), scale_wrt_gas=False)


def _take_scheduler(engine: Any) -> ByHand | None:
    """Take the scheduler from the engine, which would move it a step at a time."""
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    return None if scheduler is None else ByHand(scheduler)


def _step(engine: Any, window: PlannedWindow) -> tuple[Any, bool]:
    if window.total == 0:
        engine.step()
        return None, False
    # fp16: a scale that grows in this step must not reach the gradients, which were scaled by the old one.
    if window.expected == window.total and not engine.fp16_enabled():
        engine.step()
        return engine.get_global_grad_norm(), engine.was_step_applied()
    return _corrected(engine, window), engine.was_step_applied()


def _corrected(engine: Any, window: PlannedWindow) -> Any:
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        for flat in optimizer.fp32_groups_gradients_flat:
            flat.mul_(window.expected / window.total)
        engine.step()
        return engine.get_global_grad_norm()
    if engine.zero_optimization():
        optimizer.override_loss_scale(optimizer.loss_scale * window.total / window.expected)
        engine.step()
        optimizer.custom_loss_scaler, optimizer.external_loss_scale = False, None
        return engine.get_global_grad_norm()
    if engine.bfloat16_enabled():
        optimizer.loss_scale_config.cur_scale = window.total / window.expected
        engine.step()
        optimizer.loss_scale_config.cur_scale = 1.0
        raw = isinstance(optimizer, FP16_UnfusedOptimizer)
        return engine.get_global_grad_norm() * (window.expected / window.total if raw else 1.0)
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(window.expected / window.total)
    engine.step()
    return engine.get_global_grad_norm()
