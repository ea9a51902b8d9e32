"""Reference `deepspeed-loop`: the bare engine with a moving boundary, driven by hand as RL trainers write it.

It knows all counts beforehand. It shares no code with the engine under test (tests/parity/test_reference_imports.py):
the division, the boundary, the correction and the scheduler's position are written here a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import wrapt

from ds_parity.config import Settings
from ds_parity.errors import ConfigError
from ds_parity.parity.running.functions import run_loop
from ds_parity.parity.running.layouts import of_one_unit
from ds_parity.parity.running.own_batches import Record, after_building, after_window, begin, own_batches, stand_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import (
    PlannedWindow,
    given_share,
    weighs,
    weights_of_terms,
    windows_of,
)
from ds_parity.parity.subjects.references.bare import StepNotes, initialize
from ds_parity.parity.subjects.references.call_order import CallOrder
from ds_parity.parity.subjects.references.private_state import (
    averages_over_ranks,
    clip_by_all_experts,
    corrected_step,
    missing_loss_scale,
    scales_losses,
)
from ds_parity.parity.subjects.references.torch_counterparts import ByHand
from ds_parity.planning.rollout import MicroBatch


def drive_by_hand(scenario: Scenario, record: Record) -> Any:
    """Run the scenario with `set_gradient_accumulation_boundary` before every backward."""
    return _driven(HandDriven(scenario, record))


def drive_bare(scenario: Scenario, record: Record) -> Any:
    """Run the same loop without any correction: every loss is divided by the actual total, and DeepSpeed does the rest.

    This is no reference. It is what judges a DeepSpeed itself, of any version from 0.16 on.
    """
    return _driven(HandDriven(scenario, record, corrects=False))


def _driven(loop: HandDriven) -> Any:
    scenario = loop.scenario
    if scenario.train is not None:
        engine = TrainableEngine(loop)
        run_loop(scenario.train, engine, engine.passes())
        return loop.engine
    for index in range(loop.passes):
        loop.backward(index, loop.engine(**loop.runs(index).inputs))
        loop.step(index)
    return loop.engine


class HandDriven:
    """The passes of one rank, one after the other.

    Args:
        scenario: what it runs.
        record: called with every step.
        corrects: what DeepSpeed gets wrong is put right, and windows whose total was estimated are corrected.

    Attributes:
        scenario: what it runs.
        engine: the bare engine.
        passes: how many there are.
    """

    def __init__(self, scenario: Scenario, record: Record, *, corrects: bool = True) -> None:
        self.scenario, self._settings, self._record = scenario, scenario.settings, record
        self._corrects = corrects
        self.engine = initialize(scenario)
        if corrects:
            clip_by_all_experts(self.engine)
        begin(record, self.engine.module)
        after_building(scenario, self.engine)
        batches = scenario.batches()
        self._own = own_batches(scenario, batches)
        self.passes = len(batches)
        self._idle, self._notes = stand_in(scenario), StepNotes(self.engine, scenario, batches)
        self._by_hand = _take_scheduler(self.engine) if self._settings.lr_progress == "rollout" else None
        ahead = corrects and _looks_ahead(scenario)
        windows = windows_of(batches, self._settings, lookahead=ahead)
        if not corrects:
            windows = [replace(window, expected=window.total) for window in windows]
        # With a shorter look-ahead ds_parity divides by an estimate, which is not written out here.
        lookahead = self._settings.lookahead
        if ahead and not self._settings.by_caller and lookahead != "window" and _longest(windows) > lookahead:
            raise ConfigError(
                "deepspeed-loop knows the totals of whole windows: ds_parity.lookahead must hold the longest"
            )
        self._windows = {i: (n, w) for n, w in enumerate(windows, start=1) for i in range(w.first, w.last + 1)}

    def runs(self, index: int) -> MicroBatch:
        """Return what this rank runs in a pass: its micro-batch, or a stand-in."""
        return self._idle if self._own[index].idle else self._own[index]

    def backward(self, index: int, loss: Any, **kwargs: Any) -> None:
        """Mark the boundary and run the backward of a pass; `kwargs` are DeepSpeed's."""
        _, window = self._windows[index]
        # Before the backward: ZeRO 0 and 1 reduce in it, and only at a boundary. A window without weight has none.
        self.engine.set_gradient_accumulation_boundary(index == window.last and window.total > 0)
        self._backward(loss, self._own[index], window, **kwargs)

    def _backward(self, loss: Any, batch: MicroBatch, window: PlannedWindow, **kwargs: Any) -> None:
        engine, settings, notes = self.engine, self._settings, self._notes
        units = weighs(batch, settings)
        if units == 0:
            silent = loss if settings.terms is None else sum(loss.values())
            engine.backward(silent * 0.0, scale_wrt_gas=False, **kwargs)
            return
        if settings.terms is not None:
            divided = _of_terms(loss, batch, window, settings, notes) * _averaged_over(engine, self.scenario)
        else:
            if window.divided_by is not None:
                # The caller divides, and what goes in is what the step's loss is made of.
                loss = loss * given_share(batch, window)
            notes.add(loss, units)
            averaged = _averaged_over(engine, self.scenario)
            share = averaged if settings.loss_reduction == "sum" else averaged * units
            divided = loss / (window.expected / share)
        scale = missing_loss_scale(engine) if self._corrects else None
        if scale is not None:
            divided = divided.float() * scale
        engine.backward(divided, scale_wrt_gas=False, **kwargs)

    def step(self, index: int) -> None:
        """End a pass; at the boundary update, move the scheduler and write down."""
        number, window = self._windows[index]
        if index < window.last:
            self.engine.step()
            return
        # The LR of a step is the one before its scheduler moves.
        lr = self.engine.get_lr()
        norm, applied = _step(self.engine, window, self._corrects)
        # After the step, as DeepSpeed moves its scheduler, and not where the step was skipped.
        if self._by_hand is not None:
            self._by_hand.advance(window.progress, applied)
        line = self._notes.record(number, window, lr, norm, applied)
        if self.scenario.train is not None:
            # A training function records metrics of its own, which this reference does not know.
            line = line.model_copy(update={"metrics": {}})
        self._record(line, self.engine.module)
        after_window(self.scenario, self.engine)


class TrainableEngine(wrapt.ObjectProxy[Any]):
    """The bare engine with the calls of a training function: what `ds_parity.initialize` returns takes the same."""

    def __init__(self, loop: HandDriven) -> None:
        super().__init__(loop.engine)
        self._self_loop = loop
        self._self_order = CallOrder()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return self.__wrapped__(*args, **kwargs)

    def passes(self, *_: Any, **__: Any) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches, and a stand-in where it is idle."""
        for index in range(self._self_loop.passes):
            self._self_order.take(index)
            # A stand-in keeps its counts here, where nothing counts them: divided by 0 tokens a loss would be NaN, and
            # the factor of 0 by which this reference silences it would not remove that.
            yield self._self_loop.runs(index)

    def backward(self, loss: Any, retain_graph: bool = False, **counts: Any) -> Any:
        """Run the backward of the pass that was handed out last; its counts are known."""
        kept = {"retain_graph": True} if retain_graph else {}
        self._self_loop.backward(self._self_order.run(), loss, **kept)
        return loss

    def idle(self, loss: Any) -> Any:
        """Run an idle pass."""
        return self.backward(loss)

    def step(self, *_: Any) -> None:
        """End the pass."""
        self._self_loop.step(self._self_order.end())

    def expect(self, **_: Any) -> None:
        """All counts are known here."""

    def record(self, *_: Any) -> None:
        """Metrics of a training function are its own."""

    def finish(self) -> None:
        """The last window was settled with its last pass."""


def _longest(windows: list[PlannedWindow]) -> int:
    return max(window.last - window.first + 1 for window in windows)


def _looks_ahead(scenario: Scenario) -> bool:
    return scenario.settings.lookahead != 0 and scenario.drive == "passes"


def _averaged_over(engine: Any, scenario: Scenario) -> float:
    averaged: float = scenario.ranks if averages_over_ranks(engine) else 1
    if engine.zero_optimization_stage() < 3:
        # Every rank of a group gathers the whole loss, so the group's gradients sum to as many times their value; only
        # ZeRO 3 averages over the group as well.
        averaged /= scenario.sequence_parallel
    return averaged


def _of_terms(losses: Any, batch: MicroBatch, window: PlannedWindow, settings: Settings, notes: StepNotes) -> Any:
    """Return the sum of coefficient * weight * loss / total over the terms of a micro-batch, and note each term."""
    apart = not of_one_unit(settings)
    combined: Any = 0.0
    weights = weights_of_terms(batch, settings)
    for name, term in (settings.terms or {}).items():
        loss, units = losses[name], weights[name]
        if not units:
            combined = combined + loss * 0.0
            continue
        total = window.totals[name] if apart else window.expected / len(losses)
        own = 1 if settings.loss_reduction == "sum" else units
        combined = combined + loss * (term.coefficient * own / total)
        notes.add_term(name, loss, units)
    notes.add(combined, window.expected)
    return combined


def _take_scheduler(engine: Any) -> ByHand | None:
    """Take the scheduler from the engine, which would move it a step at a time."""
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    return None if scheduler is None else ByHand(scheduler)


def _step(engine: Any, window: PlannedWindow, corrects: bool) -> tuple[Any, bool]:
    if window.total == 0:
        engine.step()
        return None, False
    # fp16: a scale that grows in this step must not reach the gradients, which were scaled by the old one, and clipping
    # must not act on scaled ones.
    if not corrects or (window.expected == window.total and not scales_losses(engine)):
        engine.step()
        return engine.get_global_grad_norm(), engine.was_step_applied()
    return corrected_step(engine, window.expected, window.total), engine.was_step_applied()
