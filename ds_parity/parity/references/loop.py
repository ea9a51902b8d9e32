"""Reference `deepspeed-loop`: the bare engine with a moving boundary, driven by hand as RL trainers write it.

It knows all counts beforehand. It shares no code with the engine under test; the division, the boundary, the correction
and the scheduler's position are written out here once more.
"""

from __future__ import annotations

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
    windows = plan(passes, settings, lookahead=_looks_ahead(scenario))
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
        if by_hand is not None:
            by_hand.advance(window.progress, applied)
        record(notes.record(number, window, lr, norm, applied), engine.module)
    return engine


def _looks_ahead(scenario: Scenario) -> bool:
    return scenario.settings.lookahead > 0 and scenario.drive == "passes"


def _backward(
    engine: Any, batch: MicroBatch, idle: MicroBatch, window: PlannedWindow, scenario: Scenario, notes: StepNotes
) -> None:
    settings = scenario.settings
    units = weight(batch, settings.loss_weight)
    loss = engine(**(idle if batch.idle else batch).inputs)
    if units == 0:
        engine.backward(loss * 0.0, scale_wrt_gas=False)
        return
    notes.add(loss, units)
    averaged: float = scenario.ranks if engine.gradient_average else 1
    if engine.zero_optimization_stage() < 3:
        # Gathered losses sum to so many times their gradient, and only ZeRO 3 averages over all who hold them.
        averaged /= scenario.sequence_parallel
    share = averaged if settings.loss_reduction == "sum" else averaged * units
    divided = loss / (window.expected / share)
    if engine.fp16_enabled() and not engine.zero_optimization():
        # DeepSpeed leaves the scaling out there (tools/deepspeed_faults/fp16_zero0_unscaled_loss.py).
        divided = divided.float() * engine.optimizer.loss_scale_config.cur_scale
    engine.backward(divided, scale_wrt_gas=False)


def _take_scheduler(engine: Any) -> ByHand | None:
    """Take the scheduler from the engine, which would move it a step at a time."""
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    return None if scheduler is None else ByHand(scheduler)


def _step(engine: Any, window: PlannedWindow) -> tuple[Any, bool]:
    if window.total == 0:
        engine.step()
        return None, False
    # fp16: a scale that grows in this step must not reach the gradients, which were scaled by the old one, and clipping
    # must not act on scaled ones.
    scaled = engine.fp16_enabled() or getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None
    if window.expected == window.total and not scaled:
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
        return _corrected_by_scale(engine, window)
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        return _corrected_without_zero(engine, window)
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(window.expected / window.total)
    engine.step()
    return engine.get_global_grad_norm()


def _corrected_by_scale(engine: Any, window: PlannedWindow) -> Any:
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    scale = optimizer.loss_scale if scaler is None else scaler.get_scale()
    optimizer.override_loss_scale(scale * window.total / window.expected)
    optimizer.torch_autocast_gradscaler = None
    engine.step()
    optimizer.custom_loss_scaler, optimizer.external_loss_scale = False, None
    optimizer.torch_autocast_gradscaler = scaler
    return engine.get_global_grad_norm()


def _corrected_without_zero(engine: Any, window: PlannedWindow) -> Any:
    optimizer, config = engine.optimizer, engine.optimizer.loss_scale_config
    scale, dynamic, iterations = config.cur_scale, config.dynamic_loss_scale, config.cur_iter
    config.cur_scale, config.dynamic_loss_scale = scale * window.total / window.expected, False
    engine.step()
    config.cur_scale, config.dynamic_loss_scale = scale, dynamic
    if dynamic:
        config.cur_iter = iterations
        optimizer._update_scale(optimizer.overflow)
    # The unfused wrapper keeps the norm as the gradients came in.
    raw = isinstance(optimizer, FP16_UnfusedOptimizer) and not optimizer.overflow
    norm = engine.get_global_grad_norm()
    return norm * (window.expected / window.total / scale) if raw else norm
