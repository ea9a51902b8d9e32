"""Reference `deepspeed-loop`: the bare engine with a moving boundary, driven by hand as RL trainers write it.

It knows all counts beforehand. It shares no code with the engine under test; the division, the boundary, the correction
and the scheduler's position are written out here once more.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from ds_parity.config import Settings
from ds_parity.errors import ConfigError
from ds_parity.parity.candidate import Record, own_batches, stand_in
from ds_parity.parity.oracle import PlannedWindow, plan, weight
from ds_parity.parity.references.bare import StepNotes, initialize
from ds_parity.parity.scenario import Scenario
from ds_parity.planning.records import MicroBatch


def run(scenario: Scenario, record: Record) -> Any:
    """Run the scenario with `set_gradient_accumulation_boundary` before every backward."""
    settings = scenario.settings
    engine = initialize(scenario)
    passes, own = scenario.batches(), own_batches(scenario)
    idle, notes = stand_in(scenario), StepNotes(scenario, passes)
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
        norm, applied = _step(engine, window, settings)
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
    ranks: float = scenario.ranks
    if engine.zero_optimization_stage() < 3:
        # Gathered losses sum to so many times their gradient, and only ZeRO 3 averages over all who hold them.
        ranks /= scenario.sequence_parallel
    share = ranks if settings.loss_reduction == "sum" else ranks * units
    engine.backward(loss / (window.expected / share), scale_wrt_gas=False)


def _step(engine: Any, window: PlannedWindow, settings: Settings) -> tuple[Any, bool]:
    kwargs = {}
    if settings.lr_progress == "rollout" and engine.lr_scheduler is not None:
        kwargs["lr_kwargs"] = {"last_batch_iteration": float(window.progress) - 1}
    if window.total == 0:
        engine.step()
        return None, False
    if window.expected == window.total:
        engine.step(**kwargs)
        return engine.get_global_grad_norm(), engine.was_step_applied()
    return _corrected(engine, window, kwargs), engine.was_step_applied()


def _corrected(engine: Any, window: PlannedWindow, kwargs: dict[str, Any]) -> Any:
    optimizer = engine.optimizer
    if engine.zero_optimization():
        optimizer.override_loss_scale(optimizer.loss_scale * window.total / window.expected)
        engine.step(**kwargs)
        optimizer.custom_loss_scaler, optimizer.external_loss_scale = False, None
        return engine.get_global_grad_norm()
    if engine.bfloat16_enabled():
        optimizer.loss_scale_config.cur_scale = window.total / window.expected
        engine.step(**kwargs)
        optimizer.loss_scale_config.cur_scale = 1.0
        raw = isinstance(optimizer, FP16_UnfusedOptimizer)
        return engine.get_global_grad_norm() * (window.expected / window.total if raw else 1.0)
    for parameter in engine.module.parameters():
        parameter.grad.mul_(window.expected / window.total)
    engine.step(**kwargs)
    return engine.get_global_grad_norm()
