"""One pass after another. `run_pass` is the only place that knows the order of a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, overload

import torch

from ds_parity.config import Settings
from ds_parity.engine.among_ranks import AmongRanks
from ds_parity.engine.arguments import counts_of
from ds_parity.engine.boundary import Boundary
from ds_parity.engine.division import Division, Loss
from ds_parity.engine.early import announced_early
from ds_parity.engine.expecting import promised
from ds_parity.engine.given_counts import GivenCounts
from ds_parity.engine.internals.dropped_tokens import refuse_dropped_tokens
from ds_parity.engine.internals.groups import members_of
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.late_pass import LatePass
from ds_parity.engine.pass_state import OF_PLANS, PARTLY_THERE, PassState
from ds_parity.engine.planned import PlansRead, refuse_different_plans
from ds_parity.engine.preconditions import refuse_ending_here, refuse_idle, refuse_schedule, refuse_strays
from ds_parity.engine.ranks.agreement import naming_lost_ranks
from ds_parity.engine.ranks.upcoming import UpcomingPass
from ds_parity.engine.ranks.wire import RUNS, SAVES, Announcement, Gives
from ds_parity.engine.record.metrics import Meter
from ds_parity.errors import RankDesyncError, WindowError
from ds_parity.window import Counts, PassTotals, Promise, Window


@dataclass(frozen=True, slots=True)
class CallersBoundary:
    """What a caller with a boundary of its own says of a pass.

    Attributes:
        ends: the pass ends its window, also short of the target.
        doing: the same in words, for the other ranks: all must say the same.
        check: called with what the pass contains over all ranks, before it is counted; raises where the counts say
            otherwise.
    """

    ends: bool
    doing: str
    check: Callable[[PassTotals], None]


class Driver(AmongRanks):
    """Drives a DeepSpeed engine by the rollouts that the whole cluster has consumed.

    Args:
        engine: the bare DeepSpeed engine.
        settings: the extra keys.
        slots: passes that one exchange holds (>= 1).
        sequence: sequence-parallel size that the engine was asked for (>= 1).
        number: of the engine among those of this process, the same on every rank (>= 1).

    Attributes:
        usual_rollouts: what a micro-batch contains where the caller gives no count.
        speaks: whether this rank stands for those that share its micro-batch.
        meter: the window's loss and metrics.
        boundary: what closing a window does: DeepSpeed's counters, the scheduler and the last step are there.
        state: what the loop owes, and whether the open window can go on.
        given: where the counts of a pass come from.
        on_resume: called with the windows closed so far, once a checkpoint has put them back.
    """

    def __init__(self, engine: Engine, settings: Settings, slots: int, sequence: int = 1, number: int = 1) -> None:
        members = members_of(engine, sequence)
        peers = members.peers
        super().__init__(engine, settings, members, slots, number)
        assert isinstance(settings.train_micro_batch_size_per_gpu, int)  # filled in by now
        self.usual_rollouts = settings.train_micro_batch_size_per_gpu
        self.on_resume: list[Callable[[int], None]] = []
        self.speaks = peers.own == 0
        # With the loss travels what the window has used: the last that is said before a step.
        over = self.over_ranks("sums the loss and metrics of a step", used=True)
        self.meter = Meter(torch.device(engine.device), members.group, over, peers.size)
        by_rollout = settings.lr_progress == "rollout"
        self.boundary = Boundary(self.adapter, self.ledger, self.meter, by_rollout=by_rollout)
        self._division = Division(self.adapter, self.meter, self.ranks, members.summed)
        self.state = PassState(self.adapter, self.ledger)
        self.given = GivenCounts(self, self.usual_rollouts)
        self._late = LatePass(self, self.given, self.state, self._division, self.boundary, alone=peers.size == 1)
        self._finished = False
        self.adapter.prepare()
        # DeepSpeed's own boundary follows from its counter; from here on it is marked by hand before every backward.
        self.boundary.mark(False)

    # One pass.

    def before_forward(self) -> None:
        """Look whether a forward would be wrong, or belongs to a loop that trains nothing."""
        refuse_dropped_tokens(self.engine)
        self.adapter.kept.untrained.before_forward()

    def counts_given(
        self,
        rollouts: SupportsIndex | None,
        prompts: SupportsIndex | None,
        tokens: SupportsIndex | None,
        weight: Any = None,
        terms: Set[str] | None = None,
    ) -> Counts:
        """Return the counts of the coming pass: the caller's, completed; inside `passes`, the micro-batch's own.

        Args:
            rollouts: what the caller gives for the micro-batch (>= 0); None where it gives nothing.
            prompts: likewise.
            tokens: likewise.
            weight: likewise, of `loss_weight: weight` (finite and >= 0), or of terms by their names.
            terms: names of those that the loss has; None where it is one tensor.

        Raises:
            WindowError: the pass before waits for its `step()`; or a count is missing, wrong or contradicts `passes`.
                Outside of `passes` the other ranks are told.
        """
        self.refuse_owed_step()
        return self.given.of_pass(rollouts, prompts, tokens, weight, terms)

    @overload
    def run_pass(
        self, loss: Loss, counts: Counts, caller: CallersBoundary | None = None, **kwargs: Any
    ) -> torch.Tensor: ...

    @overload
    def run_pass(self, loss: None, counts: Counts) -> None: ...

    def run_pass(
        self, loss: Loss | None, counts: Counts, caller: CallersBoundary | None = None, **kwargs: Any
    ) -> torch.Tensor | None:
        """Run one pass: exchange its counts, count it in its window, divide its loss, run DeepSpeed's backward.

        Args:
            loss: scalar, or terms by their names; None for an idle pass that needs neither forward nor backward on
                this rank (`may_skip`).
            counts: what this rank's micro-batch contains.
            caller: what a caller with a boundary of its own says of the pass.
            **kwargs: for DeepSpeed's `backward`.

        Returns:
            The loss as it was accumulated; None for None.

        Raises:
            WindowError: the pass before waits for its `step()`; the pass overshoots under `overshoot: error`; the
                caller's boundary contradicts the counts; or the window would close inside no_sync().
            RankDesyncError: ranks are out of sync.
        """
        self.refuse_owed_step()
        refuse_dropped_tokens(self.engine)  # of a forward past the engine, too
        # All modules are looked through, which is not done in every pass. The first one has left gradients here, and
        # where ranks differ, ZeRO 0 would add up others in the boundary's backward (gloo ends a process there).
        refuse_strays(self, newcomers=self.ledger.window.passes == 1)
        refuse_idle(self, counts)
        self._finished = caller is not None  # a framework ends its last window, and never says that it was the last
        if loss is not None and caller is None and self._late.is_possible():
            return self._late.run(loss, counts, **kwargs)
        totals, ahead, whole = self._exchanged(counts, caller)
        window = self._counted(totals, ahead, caller, whole=whole)
        if loss is None:
            self.engine.step()  # moves DeepSpeed's clocks; inside a window it does nothing else
            self.state.lost = ""
            return None
        self.state.awaits_step = True
        return self._run_backward(loss, counts, window, **kwargs)

    def _run_backward(self, loss: Loss, counts: Counts, window: Window, **kwargs: Any) -> torch.Tensor:
        # A window without weight takes no optimizer step, so DeepSpeed sees no boundary either.
        steps = window.closed and self.ledger.total() > 0
        if steps and self.adapter.inside_no_sync:
            raise WindowError(
                f"backward() inside no_sync() in the pass that closes window {window.index}: its gradients would not "
                "be reduced, and ranks' weights would differ; leave no_sync() out, DeepSpeed communicates only where "
                "it must"
            )
        # ZeRO 0 and 1 reduce in the boundary's backward, so DeepSpeed must know of it before.
        self.boundary.mark(steps)
        with self.telling():
            accumulated = self._division.backward(loss, counts, self.ledger.weighting, window, **kwargs)
        if window.passes == 1:
            self.adapter.forget_last_window(steps)
        if steps:
            self.adapter.deliver()
        self.state.ran_backward()
        return accumulated

    def _exchanged(self, counts: Counts, caller: CallersBoundary | None) -> tuple[PassTotals, list[PassTotals], bool]:
        """Return what the pass contains over all ranks, what is known of those after it, and whether that is all."""
        if self.queue is not None:
            if self.queue.whole_windows:
                return (*self.queue.take(len(self.queue)), self.queue.settles)
            # How far a chunk that was begun in the window before reaches into this one is chance: a run that is resumed
            # here begins a chunk. What every window knows of itself is its first chunk.
            within = max(0, self.exchange.slots - 1 - self.ledger.window.passes)
            return (*self.queue.take(within), False)
        upcoming = self.upcoming(caller.doing if caller else RUNS)
        upcoming.announce([UpcomingPass(Announcement(counts, gives=self.given.gives))])
        return (*upcoming.take(0), False)

    def _counted(
        self, totals: PassTotals, ahead: Sequence[PassTotals], caller: CallersBoundary | None, *, whole: bool
    ) -> Window:
        if caller is not None:
            caller.check(totals)
        # Set before it is counted: Ctrl-C may come behind any line, and leave a pass that has no gradient.
        self.state.lost = PARTLY_THERE
        try:
            window = self.ledger.count(totals, ahead, whole=whole)
        except WindowError:  # it was not
            self.state.lost = ""
            raise
        return self.ledger.end() if caller is not None and caller.ends else window

    def step(self, **kwargs: Any) -> None:
        """End the pass; at the boundary correct, update, move the scheduler, record.

        Args:
            **kwargs: for DeepSpeed's `step`.

        Raises:
            WindowError: there was no backward since the last step, or it has raised.
            RankDesyncError: ranks take their micro-batches from different plans.
        """
        self.adapter.kept.refuse_ended()
        with self.telling():
            self.state.refuse_lost()
            refuse_ending_here(self)
        self.state.refuse_step_alone()
        if self.ledger.window.closed:
            self._refuse_different_plans()
            refuse_strays(self, newcomers=True, ends=True)
            self.boundary.schedule()  # one that cannot be moved is refused while step() may come again
            if self.ledger.total() > 0:
                refuse_schedule(self, kwargs.get("lr_kwargs"), "step()")
        self.state.awaits_step = False
        with self.state.ending():
            if not self.ledger.window.closed:
                self.engine.step(**kwargs)
                return
            queue = None if self.over is None else self.queue  # alone there is nobody to tell
            with announced_early(self.exchange, queue, self.meter, lambda: self._place(RUNS)):
                if self.ledger.total() > 0:
                    with self.telling():
                        self.boundary.update(**kwargs)
                else:
                    self.engine.step(**kwargs)
                    self.boundary.skip()

    def _refuse_different_plans(self) -> None:
        """Raise RankDesyncError where ranks have begun different plans; every rank comes, in front of a step.

        An exchange of counts shows that ranks may have, and can't tell: one rank goes into its forward while it is
        under way, and another waits for it there.
        """
        self.exchange.settle()
        over = self.over_ranks("compares plans") if self.exchange.plans_in_doubt else None
        if over is not None:
            try:
                with naming_lost_ranks("step(), where all compare their plans"):
                    refuse_different_plans(over.gather, self.plans)
            except RankDesyncError:
                self.state.lost = OF_PLANS
                raise
        self.exchange.plans_in_doubt = False

    def end_pass(self) -> None:
        """End a pass inside a window without DeepSpeed's `step()`, which there only moves a counter put right later."""
        self.state.awaits_step = False

    def refuse_owed_step(self) -> None:
        """Raise WindowError where the pass before waits for its step(): asked before anything is announced or taken."""
        self.state.refuse_owed_step()

    # What a window will contain.

    def expect(self, passes: SupportsIndex | None, weight: Any, **given: SupportsIndex | None) -> None:
        """Take note of what this rank's next window will contain: one exchange of all ranks.

        Args:
            passes: micro-batches that are not idle; None where it isn't said.
            weight: what they weigh together, or weights by the names of terms; None where it isn't said.
            **given: rollouts, prompts and tokens, likewise.

        Raises:
            WindowError: a window is open, a number is wrong, or one that weighs the loss is missing.
            RankDesyncError: ranks are out of sync, or say numbers of other things.
        """
        with self.telling():
            own, said = promised(self.ledger.window, self.ledger.weighting, passes, weight, given)
        place = replace(self._place(f"says {', '.join(sorted(said))} of its next window"), pass_index=0)
        self.ledger.promise(Promise(self.exchange.whole_window(place, own, Gives.EITHER), said))

    def may_skip(self, totals: PassTotals) -> bool:
        """Whether the coming pass, idle on this rank, needs neither forward nor backward here.

        ZeRO 0 and 1 talk to other ranks in the boundary's backward alone, so a rank runs that one. It runs the first
        pass too: without any gradient, stage 0 hangs and stage 1 raises a KeyError. With overlap_comm it runs those
        after it until every parameter has a gradient, because stage 1 reduces only these there.
        """
        inside = self.state.ran_in == self.ledger.window.index and not self.ledger.closes_with(totals)
        # With SyncBatchNorm the others' forward waits for this rank, which hears there that the pass is refused.
        silent = self.adapter.silent_inside_windows and not self.adapter.shares_statistics
        return inside and silent and self.adapter.has_every_gradient()

    # The end of the data.

    def finish(self, **kwargs: Any) -> None:
        """Settle the window that the data ended in: step, drop or error.

        Args:
            **kwargs: for DeepSpeed's `step`.

        Raises:
            WindowError: a window is open and `last_window` is `error`, or it has a backward that raised; or its
                scheduler needs what it was not given.
            RankDesyncError: not every rank has finished.
        """
        if self.ledger.window.passes:
            self.adapter.kept.refuse_ended()
        with self.telling():
            self.state.refuse_lost()
            refuse_ending_here(self)
        if self.state.awaits_step:
            raise WindowError("finish() between a backward() and its step(): call step() first")
        if self.ledger.window.passes and self.settings.last_window == "step" and self.ledger.total() > 0:
            refuse_schedule(self, kwargs.get("lr_kwargs"), "finish()")
        # All ranks must end here: one that still runs passes would wait in its own exchange.
        self.exchange.start(self._place("finishes"), []).wait()
        self._finished = True
        self.given.forget_left()
        window = self.ledger.window
        if window.passes == 0:
            # A run that was asked to stop has more data: whoever resumes it goes on with the surplus.
            if not self.exchange.stopping:
                self.ledger.begin_anew()
            return
        self._refuse_different_plans()
        if self.settings.last_window == "error":
            raise WindowError(
                f"the data ended inside window {window.index}: {self.ledger.units()} of {window.target} "
                f"{self.settings.count}s after {window.passes} passes, and ds_parity.last_window is 'error'; feed a "
                "multiple of the target, or choose 'step' or 'drop'"
            )
        refuse_strays(self, newcomers=True, ends=True)
        self._settle_last_window(**kwargs)

    def _settle_last_window(self, **kwargs: Any) -> None:
        drop = self.settings.last_window == "drop"
        if drop:
            self.ledger.drop()
        self.ledger.end()
        with self.state.ending():
            if self.ledger.total() == 0:
                self.boundary.skip()
            elif drop:
                self.boundary.drop()
            else:
                # There is no backward left that could reduce on ZeRO 0 and 1.
                self.boundary.reduce()
                with self.telling():
                    self.boundary.update(**kwargs)

    def passes_pending(self) -> int:
        """Return how many passes of the open window have run."""
        return self.ledger.window.passes

    def meet_to_save(self) -> None:
        """Wait until all ranks come to save a checkpoint."""
        self.meet(self._place(SAVES))

    def refuse_loading(self) -> None:
        """Raise CheckpointError where nothing can be loaded now; here it can at any time."""

    def abandon(self) -> None:
        """Throw the open window away, gradients, losses and metrics with it: what comes next is loaded over it."""
        # What a loop has left open (`break`) is heard now: heard later, its doubt would be of one rank alone.
        with suppress(RankDesyncError):
            self.exchange.settle()
        # Also before a window's first pass: a stray gradient may be what the loading is to mend.
        with self.adapter.kept.released():
            # DeepSpeed can't clear what a stray has left in its buckets; the next backward says so.
            if not self.adapter.kept.broken:
                self.adapter.discard()
        if self.ledger.window.passes:
            self.boundary.counters.consumed(self.ledger.window.rollouts)
        self.meter.reset()
        self.ledger.restore(self.ledger.state())  # the state knows whole windows only: the open one is gone
        self.state.reset()
        self.plans, self.exchange.plans_in_doubt = PlansRead(self.plans.earlier), False
        self.given.abandon()
        self.boundary.mark(False)

    # Small things.

    def stops_here(self) -> bool:
        """Whether a rank has asked to stop and this is a boundary: between windows, the same answer on every rank."""
        return self.exchange.stopping and not self.state.awaits_step and self.ledger.window.passes == 0

    @property
    def ended(self) -> bool:
        """Whether the run has ended as far as anybody can tell: finished, stopped, or between a framework's windows."""
        return (self._finished and self.ledger.window.passes == 0) or self.stops_here()

    def at_boundary(self) -> bool:
        """Whether the current pass ends its window, as `ParityEngine.is_gradient_accumulation_boundary` says.

        Raises:
            WindowError: it is asked before `backward` in a loop that passes counts, which nothing can foretell.
        """
        if self.state.awaits_step:
            return self.ledger.window.closed
        if self.queue is not None:
            return self.ledger.closes_with(self.queue.next_totals())
        if self.given.by_loop:
            raise WindowError(
                "is_gradient_accumulation_boundary() before backward(): the counts of this pass are not known yet; ask "
                "between backward() and step(), or take micro-batches from passes(stream, lookahead=...)"
            )
        usual = counts_of(self.settings, self.usual_rollouts, {})
        return self.ledger.closes_with(PassTotals.of([usual] * self.ranks))
