"""Windows that the caller ends: any number of backwards, then one step()."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ds_parity.config.features import COALESCED
from ds_parity.engine.division import Loss
from ds_parity.engine.driver import CallersBoundary, Driver
from ds_parity.engine.internals.installed import refused_by_call
from ds_parity.engine.pass_state import ENDED_APART, PARTLY_THERE
from ds_parity.engine.preconditions import refuse_ending_here, refuse_idle, refuse_schedule, refuse_strays
from ds_parity.engine.ranks.wire import SAVED, SAVES, Place
from ds_parity.errors import CheckpointError, ConfigError, RankDesyncError, WindowError
from ds_parity.window import Counts, PassTotals, WindowTotals

OPENS, ENDS, FINISHES = "opens its first window", "ends a window", "finishes"


class CallersDriver(Driver):
    """Drives a DeepSpeed engine whose caller ends each window by `step()` (`ds_parity.boundary: caller`).

    This rank's micro-batches are counted by themselves, and summed over ranks in `step()`, so that passes exchange
    nothing. Losses are divided by the total of the window before, which every rank knows, and the gradient is corrected
    in the step. The first window has none before it: its ranks exchange what their first micro-batches weigh.
    """

    announced = False  # the caller has said that the coming backward is the window's last
    _reduced = False  # the window's gradients have been reduced in the backward that was announced as its last
    _opened = False
    _coalesces = False  # inside coalesce_grad_reduction(), at whose end the window's gradients are reduced

    def run_pass(  # type: ignore[override]
        self, loss: Loss, counts: Counts, caller: CallersBoundary | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Run one backward of the open window: count it, divide its loss, accumulate.

        Args:
            loss: scalar, or terms by their names.
            counts: what this rank's micro-batch contains.
            caller: of no use here.
            **kwargs: for DeepSpeed's `backward`.

        Returns:
            The loss as it was accumulated.

        Raises:
            WindowError: the last backward was announced as the window's last, and waits for its `step()`.
            RankDesyncError: ranks are out of sync.
        """
        self.refuse_owed_step()
        refuse_strays(self, newcomers=self.ledger.window.passes == 1)
        refuse_idle(self, counts)
        self._finished = False
        self._refuse_no_sync()
        with self.telling():
            # Before anything is counted, so that expect() is still in time.
            self.ledger.refuse_unknown_totals()
            if not self._opens_together:
                self._open()
        if self.queue is not None:
            self.queue.take(0)  # what it contains is summed with its window
        self.state.lost = PARTLY_THERE
        window = self.ledger.count_own(counts)
        self._open()
        # ZeRO 0 and 1 reduce in a boundary's backward; where none was announced, step() reduces.
        self.boundary.mark(self.announced and not self._coalesces)
        with self.telling():
            accumulated = self._division.backward(loss, counts, self.ledger.weighting, self.ledger.window, **kwargs)
        self._reduced = self.announced and not self._coalesces
        if window.passes == 1:
            self.adapter.forget_last_window(self.announced or self._coalesces)
        if self._reduced:
            self.adapter.deliver()
        self.state.ran_backward()
        return accumulated

    def _refuse_no_sync(self) -> None:
        if self.announced and self.adapter.inside_no_sync and not self._coalesces:
            with self.telling():
                raise WindowError(
                    f"the last backward() of window {self.ledger.window.index} inside no_sync(): its gradients would "
                    "not be reduced; leave no_sync() out, DeepSpeed communicates only where it must"
                )

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """Reduce once for all backwards of the block, at its end: they are those of one window. Every rank enters it.

        Raises:
            WindowError: the window's last backward has run and waits for its `step()`, or gradients were changed
                outside of `backward`.
            ConfigError: the installed DeepSpeed has no such block.
            RankDesyncError: another rank ended, is out of sync, or did not come in time.
        """
        with self.telling():
            _refuse_missing_block()
            self.refuse_owed_step()
            self._refuse_nesting()
        refuse_strays(self, newcomers=False)
        block, kept = self.adapter.engine.coalesce_grad_reduction(), self.adapter.kept
        block.__enter__()
        self._coalesces = self.adapter.keeps_whole_gradients = True
        kept.note_again()
        try:
            yield
            refuse_strays(self, newcomers=True, ends=True)
        except BaseException:
            # DeepSpeed would reduce what is there, while other ranks wait elsewhere.
            with kept.released():
                self.adapter.drop_whole_gradients()
                self.adapter.discard()
            self.state.lost = PARTLY_THERE
            self._leave(block)
            raise
        with self.waiting("the end of coalesce_grad_reduction()"):
            # All ranks have met in the first window's exchange before they meet in the reduction.
            self._open()
            self.adapter.before_coalesced()
            self._leave(block)
            self.adapter.deliver()
        self._reduced, self.announced = True, False

    def _refuse_nesting(self) -> None:
        if self.adapter.inside_no_sync:
            where = "another coalesce_grad_reduction()" if self._coalesces else "no_sync()"
            raise WindowError(
                f"coalesce_grad_reduction() inside {where}: gradients are reduced once a window, at the end of one "
                "block; put all backwards of the window into one block, and leave the other out"
            )

    def _leave(self, block: AbstractContextManager[None]) -> None:
        try:
            block.__exit__(None, None, None)
        finally:
            self._coalesces = self.adapter.keeps_whole_gradients = False
            self.adapter.kept.note_again()

    def _keep_open(self) -> None:
        """Take back what the window's end has begun, and a block that reduced nothing: no rank has run a backward."""
        self.meter.take_back()
        if self._reduced:
            with self.adapter.kept.released():
                self.adapter.discard()
        self.announced = self._reduced = False

    def announce(self, last: bool) -> None:
        """Take the caller's word that the coming backward is its window's last, so that it may reduce.

        Said again behind that backward it is of the `step()` that follows: loops mark both, and in DeepSpeed they may.

        Raises:
            WindowError: a backward has raised an error, which leaves the window without its gradients.
        """
        if last:
            self.state.refuse_lost()
        self.announced = last

    def refuse_owed_step(self) -> None:
        """Raise WindowError where nothing can be added to the window: it has been reduced, or a backward has raised."""
        self.state.refuse_lost()
        if self._reduced:
            raise WindowError(
                f"backward() in window {self.ledger.window.index} after its last one: its gradients have been reduced, "
                "by the backward() that set_gradient_accumulation_boundary(True) announced as the last, or at the end "
                "of coalesce_grad_reduction(); call step() first, or announce the last backward() alone"
            )

    def at_boundary(self) -> bool:
        """Whether the caller has announced the coming backward, or the one that has run, as its window's last."""
        return self.announced

    def _refuse_block(self) -> None:
        if self._coalesces:
            raise WindowError(
                f"window {self.ledger.window.index} can't end inside coalesce_grad_reduction(): its gradients are "
                "reduced where the block ends; call step() or finish() after the block"
            )

    def step(self, **kwargs: Any) -> None:
        """End the window: sum what it contains over ranks, reduce, correct, update, move the scheduler, record.

        Args:
            **kwargs: for DeepSpeed's `step`.

        Raises:
            WindowError: no rank ran a backward since the last step.
            RankDesyncError: ranks are out of sync; on ZeRO 2 and 3 also where they ran other numbers of backwards.
        """
        self.adapter.kept.refuse_ended()
        with self.telling():
            self.state.refuse_lost()
            self._refuse_block()
            refuse_ending_here(self)
        self._refuse_different_plans()
        refuse_strays(self, newcomers=True, ends=True)
        if self.announced and not self._reduced and (self.ledger.window.passes or self.adapter.silent_inside_windows):
            # Other ranks reduce in their last backward, and this one had none. In the first window they meet before.
            self._open()
            self._reduce()
        self.boundary.schedule()  # one that cannot be moved is refused while step() may come again
        refuse_schedule(self, kwargs.get("lr_kwargs"), "step()")
        if self._passes_over_ranks(ENDS) == 0:
            self._keep_open()
            raise WindowError(
                f"step() in window {self.ledger.window.index} without a backward() before it on any rank: with "
                "ds_parity.boundary 'caller' each step() ends a window; call it once after the window's backwards"
            )
        self._close(**kwargs)

    def finish(self, **kwargs: Any) -> None:
        """Settle the window that the data ended in: step, drop or error.

        Args:
            **kwargs: for DeepSpeed's `step`.

        Raises:
            WindowError: a window is open and `last_window` is `error`, or its scheduler needs what it was not given.
            RankDesyncError: not every rank has finished.
        """
        if self.ledger.window.passes:
            self.adapter.kept.refuse_ended()
        with self.telling():
            self.state.refuse_lost()
            self._refuse_block()
            refuse_ending_here(self)
        if self.ledger.window.passes and self.settings.last_window == "step":
            refuse_schedule(self, kwargs.get("lr_kwargs"), "finish()")
        self._refuse_different_plans()
        drop = self.settings.last_window == "drop"
        self._open()
        ledger = self.ledger
        window, counted, last_total = ledger.window, ledger.passes, ledger.last_total
        passes = self._passes_over_ranks(FINISHES, drop=drop)
        self._finished = True
        self.given.forget_left()
        if passes == 0:
            self._keep_open()
            return
        if self.settings.last_window == "error":
            # Nothing was done to the window, and its step() may still come.
            self.meter.take_back()
            ledger.window, ledger.passes, ledger.last_total, self._finished = window, counted, last_total, False
            raise WindowError(
                f"finish() in window {window.index}, which {passes} passes have run in and no step() has ended, and "
                "ds_parity.last_window is 'error'; call step() after the window's backwards, or choose 'step' or 'drop'"
            )
        refuse_strays(self, newcomers=True, ends=True)
        self._close(drop=drop, **kwargs)

    def _close(self, *, drop: bool = False, **kwargs: Any) -> None:
        with self.state.ending():
            self._settle(drop=drop, **kwargs)

    def _settle(self, *, drop: bool, **kwargs: Any) -> None:
        reduced, self._reduced, self.announced = self._reduced, False, False
        if drop or self.ledger.total() == 0:
            # DeepSpeed would take a step at the end of a backward that was announced as the last.
            self.boundary.mark(False)
            self.boundary.drop() if drop and self.ledger.total() else self.boundary.skip()
            return
        if not reduced:
            self._reduce()
            self._reduced = False
        self.boundary.mark(True)
        # On ZeRO 2 and 3 the others' next backward waits inside DeepSpeed, where nobody hears anything.
        with self.telling() if self.adapter.silent_inside_windows else nullcontext():
            self.boundary.update(**kwargs)

    def _reduce(self) -> None:
        self.boundary.reduce()
        self._reduced = True

    @property
    def _opens_together(self) -> bool:
        """Whether the open window's total is estimated from all ranks' first micro-batches: nothing is known of it."""
        return not (self._known_total or self._opened or self.ledger.window.expected)

    @property
    def _known_total(self) -> float:
        """What the open window's losses are divided by, where all ranks know it without asking; else 0.0."""
        ledger = self.ledger
        return ledger.weighting.constant or ledger.promised_total or ledger.last_total

    def _first_micro_batches(self) -> WindowTotals:
        return self.exchange.whole_window(self._place(OPENS), self.ledger.window, self.given.gives)

    def _open(self, first: WindowTotals | None = None) -> None:
        """Say what the open window's losses are divided by, until its own total is known.

        Args:
            first: what all ranks' first micro-batches contain, None: the ranks are asked where it matters.
        """
        ledger = self.ledger
        if ledger.window.expected:
            return
        expected = self._known_total
        if self._opens_together:
            first = first or self._first_micro_batches()
            # Where first micro-batches weigh nothing, those of the next window say it.
            self._opened = first.weight > 0
            # What first micro-batches weigh stands for the window: any value > 0 is put right in the step.
            counted = first.prompts if self.settings.count == "prompt" else first.rollouts
            nominal = self.settings.target / counted if self.settings.target and counted else 1.0
            expected = first.weight * nominal
        ledger.expect(expected or float(self.ranks * self.usual_rollouts))

    def _passes_over_ranks(self, doing: str, *, drop: bool = False) -> int:
        """Close the window with what all ranks have run in it, where one has; return the most that a rank ran."""
        self._open()  # a rank that has run none is waited for in the first window's exchange
        place = replace(self._place(doing), rates=() if drop else self.options.told())
        if self._reduced or not self.adapter.silent_inside_windows:
            # Else the reduction is still to come, and brings zeros for what a rank has not used.
            place = replace(place, used=self.adapter.used_parameters())
        # One sum for counts, loss and metrics.
        try:
            totals = self.exchange.whole_window(place, self.ledger.window, self.given.gives, self.meter.rider())
        except RankDesyncError as error:
            self.state.lost = ENDED_APART if error.parted else self.state.lost
            raise
        if totals.passes:
            if drop:
                self.ledger.drop()
            self.ledger.end_with(totals)
        return totals.passes

    def passes_pending(self) -> int:
        """Return the most passes that a rank has run in the open window: this one may have run none."""
        if self._opens_together:
            # Another rank's first backward of the run waits for this one, and divides by what all have said then.
            first = self._first_micro_batches()
            if first.passes == 0:
                return 0
            self._open(first)
        return self.exchange.whole_window(self._place(SAVES), self.ledger.window, self.given.gives).passes

    def meet_to_save(self) -> None:
        """Do nothing: all ranks have met where they said what they have run."""

    def abandon(self) -> None:
        """Throw the open window away; ranks may have run different numbers of its passes, which are uncounted."""
        self.ledger.passes -= self.ledger.window.passes
        self._reduced = self.announced = self._opened = False
        super().abandon()

    def refuse_loading(self) -> None:
        """Raise CheckpointError inside `coalesce_grad_reduction`, whose end would reduce what was thrown away."""
        if self._coalesces:
            raise CheckpointError(
                f"load_checkpoint() inside coalesce_grad_reduction(), in window {self.ledger.window.index}: the end of "
                "the block would reduce gradients that loading throws away; load after the block"
            )

    def may_skip(self, totals: PassTotals) -> bool:
        """Return False: the loop is handed every pass, because it ends the window by what it has been handed."""
        return False

    def _place(self, kind: str) -> Place:
        place = super()._place(kind)
        if kind in (OPENS, ENDS, FINISHES, SAVES, SAVED) and self.adapter.silent_inside_windows:
            # Ranks may run different numbers of backwards where DeepSpeed does not talk to others in them.
            return Place(kind, place.window, 0, place.configuration, place.engine)
        return place


def _refuse_missing_block() -> None:
    why = refused_by_call(COALESCED.name)
    if why is not None:
        raise ConfigError(f"coalesce_grad_reduction(): {why}")
