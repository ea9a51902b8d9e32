"""What closing a window does: correct, update, move the scheduler and DeepSpeed's counters, record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.counters import Counters
from ds_parity.engine.internals.rates_behind_loads import Standing, await_a_loop, follow_a_loop, loop_has_loaded
from ds_parity.engine.internals.schedule import RolloutSchedule, failing_loudly
from ds_parity.engine.internals.shown_groups import whole_groups
from ds_parity.engine.record.finished import Finished
from ds_parity.engine.record.metrics import Meter, Sums
from ds_parity.engine.record.skips import Skips
from ds_parity.window import Ledger, Progress

_LOG = logging.getLogger("ds_parity")


class Boundary:
    """Closes the windows of a ledger on a DeepSpeed engine.

    Args:
        adapter: of the engine's optimizer wrapper.
        ledger: the engine's windows; one that is closed is settled here.
        meter: the window's loss and metrics.
        by_rollout: the scheduler moves by rollouts.

    Attributes:
        counters: DeepSpeed's own, kept true.
        finished: the last step, None before the first.
        on_step: called with every finished step (a trace's writer).
    """

    def __init__(self, adapter: Adapter, ledger: Ledger, meter: Meter, *, by_rollout: bool) -> None:
        engine = adapter.engine
        self.counters = Counters(engine)
        self.finished: Finished | None = None
        self.on_step: list[Callable[[Finished], None]] = []
        self._engine = engine
        self._ledger = ledger
        self._meter = meter
        self._adapter = adapter
        self._corrects_every_step = adapter.corrects_every_step
        self._by_rollout = by_rollout
        self._skips = Skips()
        self._scheduled: RolloutSchedule | None = None
        self._progress_there: Progress | None = None  # of the last load, until the next step
        self._loop_loaded = False  # since the last step or load
        self.schedule()  # from the start on, the engine has the scheduler that moves by rollouts
        self._standing = Standing(engine.lr_scheduler)

    def schedule(self) -> RolloutSchedule | None:
        """Return the scheduler that moves by rollouts, None where it moves by steps or there is none.

        A loop may put another scheduler in the place of the engine's at any time: that one then moves by rollouts. One
        that was taken away from the engine (`engine.lr_scheduler = None`) is the loop's to step, as Lightning does.

        Raises:
            ConfigError: that one can't be moved by rollouts.
        """
        scheduler = self._engine.lr_scheduler
        if not self._by_rollout:
            return None
        if scheduler is None:
            return self._scheduled
        if not isinstance(scheduler, RolloutSchedule):
            self._engine.lr_scheduler = scheduler = RolloutSchedule(scheduler, on_load=self._state_loaded)
            if self.finished is not None:
                scheduler.goes_on_from_its_own_step()
        self._scheduled = scheduler
        return scheduler

    def scheduler(self) -> Any:
        """Return the engine's scheduler, also where a loop has taken away from it one that moves by rollouts."""
        schedule = self.schedule()
        return self._engine.lr_scheduler if schedule is None else schedule

    def resume_schedule(self, units_there: int, *, loaded: bool) -> int:
        """Return the units of the progress behind a load of a checkpoint.

        Args:
            units_there: those of the checkpoint.
            loaded: the scheduler's state was loaded with it. Else it begins, in a fresh engine, unless a loop gives it
                its state itself, before or behind, as Lightning does.
        """
        self._progress_there = Progress(self._ledger.rules.target, units_there)
        return units_there if loaded else self._ledger.progress.units

    def _state_loaded(self) -> None:
        """Take the place of a state that a loop has loaded for the progress."""
        if (schedule := self.schedule()) is None:
            return
        self._loop_loaded = True
        ledger, there = self._ledger, self._progress_there
        known = [one for one in (there, ledger.progress) if one is not None]
        ledger.progress = (there if loop_has_loaded(self._engine) else schedule.progress(known)) or ledger.progress
        schedule.resume_at(ledger.progress)

    def await_a_loop(self, state: Any, rates: Any) -> None:
        """Remember, behind a load without the scheduler's state, what it was and what the groups had then.

        Args:
            state: what `state_of_schedule` was where it was saved; None where the checkpoint does not tell.
            rates: what `moved_by_the_schedule` was there; likewise.
        """
        scheduler = self.scheduler()
        # Those that move by rollouts tell of their loads.
        left = True if self._loop_loaded else self._standing.has_left(scheduler)
        known = not self._loop_loaded and self._standing.tells_its_rates(scheduler)
        await_a_loop(self._engine, scheduler, left, state, rates, tells_its_rates=known)

    def has_loaded(self) -> None:
        """Say that a checkpoint was loaded: what a loop does from now on is its own."""
        self._standing.loaded(self.scheduler())
        self._loop_loaded = False

    def follow_a_loop(self, *, saves: bool = False) -> None:
        """Before a step, or a save: go on from where a checkpoint was, if a loop has loaded the scheduler itself."""
        there, followed = self._progress_there, follow_a_loop(self._engine, saves=saves)
        if followed or not saves:
            self._progress_there, self._loop_loaded = None, False
        if followed and there is not None and (schedule := self.schedule()) is not None:
            self._ledger.progress = there
            schedule.resume_at(there)

    def mark(self, boundary: bool) -> None:
        """Tell DeepSpeed whether the coming backward and step end a window."""
        self._engine.set_gradient_accumulation_boundary(boundary)

    def reduce(self) -> None:
        """Reduce gradients whose backwards have all run unmarked: behind them, as at a boundary."""
        self.mark(True)
        self._adapter.reduce()
        self._adapter.deliver()
        self._adapter.kept.after_backward()

    def update(self, **kwargs: Any) -> None:
        """Correct what was divided by a wrong total, step, and record.

        Args:
            **kwargs: for DeepSpeed's `step`.
        """
        engine, window, total = self._engine, self._ledger.window, self._ledger.total()
        self._adapter.refuse_unreduced()
        # Summed before the step: all ranks say there what they have used, while the weights are as they were.
        sums = self._meter.settle()
        self.follow_a_loop()
        # The LR that the step uses is the one before the scheduler moves.
        lr = self._lr()
        if (schedule := self.schedule()) is not None:
            schedule.advance_to(self._ledger.progress.advanced(self._ledger.units()))
        # DeepSpeed adds its fixed batch size inside step() and its monitors write then, so the counters are set
        # before.
        self.counters.before_step(self._ledger.rollouts, window.rollouts)
        # The correction and the norm must see the gradients of every parameter, so they are completed first, where no
        # backward was marked as the window's last.
        with self._adapter.kept.released(), failing_loudly(engine), whole_groups(engine):
            self._adapter.complete()
            if window.expected == total and not self._corrects_every_step:
                engine.step(**kwargs)
            else:
                with self._adapter.corrected(window.expected, total):
                    engine.step(**kwargs)
        if schedule is not None:  # DeepSpeed leaves it where it is where it skips a step
            schedule.advance_to(None)
        # DeepSpeed keeps the mark until the next one is set, and would end the next window at its first pass.
        self.mark(False)
        if applied := engine.was_step_applied():
            self._adapter.moved.count(self._adapter.groups())
        scaled = self._adapter.loss_scale() is not None or self._adapter.grad_scaler() is not None
        self._skips.note(window.index, applied=applied, scaled=scaled)
        self._settle(lr, sums, applied=applied)
        if schedule is not None and engine.lr_scheduler is None:
            schedule.advance_to(self._ledger.progress)  # the loop steps it, when it likes
        self._standing.stepped(engine.lr_scheduler)

    def skip(self) -> None:
        """Close a window that has no weight: no step, and a warning."""
        window = self._ledger.window
        _LOG.warning(
            "window %d (%d passes, %d rollouts) has a total of 0 %s: no optimizer step is taken for it, and it "
            "is recorded as skipped; look for empty rollouts or masks",
            *(window.index, window.passes, window.rollouts, self._ledger.weighting.described),
        )
        self.counters.consumed(window.rollouts)
        with self._adapter.kept.released():
            # Turns that finish no rollout have gradients, and weigh nothing. Zeros of idle passes go, too: a parameter
            # that is frozen behind them would be reduced on the ranks alone that have run one.
            self._adapter.discard()
            # ZeRO 3 partitions gathered parameters in step() alone, and this window has none.
            self._adapter.release_parameters()
        self._settle(self._lr(), self._meter.settle(), applied=False)

    def drop(self) -> None:
        """Throw away the window that the data ended in, with a warning."""
        window = self._ledger.window
        _LOG.warning(
            "the data ended inside window %d: its %d rollouts are dropped (ds_parity.last_window: drop)",
            *(window.index, window.rollouts),
        )
        with self._adapter.kept.released():
            self._adapter.discard()
        self.counters.consumed(window.rollouts)
        sums, weighting = self._meter.settle(), self._ledger.weighting
        if weighting.terms is not None and weighting.needs_totals:
            # Losses were divided by what the window was to contain.
            sums = sums.with_loss(weighting.terms.shares(window.weights), self._meter.peers)
        self._settle(self._lr(), sums, applied=False)

    def _settle(self, lr: tuple[float, ...], sums: Sums, *, applied: bool) -> None:
        # The total belongs to the window that settle() ends, so it is read first.
        total = self._ledger.total()
        window = self._ledger.settle(applied=applied)
        self.counters.settle(self._ledger)
        self.finished = Finished(
            window=window,
            total=total,
            sums=sums,
            lr=lr,
            grad_norm=self._engine.get_global_grad_norm() if applied else None,
            loss_scale=self._adapter.loss_scale(),
            skipped=not applied,
        )
        for listener in self.on_step:
            listener(self.finished)

    def _lr(self) -> tuple[float, ...]:
        return tuple(float(rate) for rate in self._engine.get_lr())
