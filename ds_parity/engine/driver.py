"""One pass after another. `run_pass` is the only place that knows the order of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, SupportsIndex, overload

import torch

from ds_parity.config import Settings
from ds_parity.engine.among_ranks import RUNS, AmongRanks
from ds_parity.engine.arguments import (
    counts_by_name,
    counts_of,
    parts_of,
    refuse_contradiction,
    refuse_forgotten,
    refuse_left_behind,
    refuse_mean_of_parts,
    refuse_missing_terms,
    refuse_what_is_no_loss,
)
from ds_parity.engine.boundary import Boundary
from ds_parity.engine.division import Division, Loss
from ds_parity.engine.early import announced_early
from ds_parity.engine.expecting import promised
from ds_parity.engine.internals.groups import members_of
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.ranks.upcoming import Upcoming, UpcomingPass
from ds_parity.engine.ranks.wire import SAVES, Announcement
from ds_parity.engine.record.metrics import Meter
from ds_parity.errors import RankDesyncError, WindowError
from ds_parity.window import Counts, PassTotals, Promise, Window

_SHARED_EXPERTS = (
    "experts on different ranks (DeepSpeed's MoE with ep_size above 1): other ranks' tokens run through this rank's "
    "experts, and its own through theirs",
    "use ep_size 1",
)
_SHARED_STATISTICS = (
    "torch's SyncBatchNorm in training: what an idle pass runs would enter the statistics that other ranks' losses "
    "depend on",
    "call eval() on these modules",
)
PARTLY_THERE: Final = (
    "a backward() that was counted and then raised, so that its gradient may be there in part or not at all"
)
PARTLY_DONE: Final = "a step() or finish() that raised, so that its update may be done in part or not at all"


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
        loop_gives_counts: a backward outside of `passes()` was given counts, so that no pass to come can be foretold.
        on_resume: called with the windows closed so far, once a checkpoint has put them back.
    """

    def __init__(self, engine: Engine, settings: Settings, slots: int, sequence: int = 1, number: int = 1) -> None:
        members = members_of(engine, sequence)
        peers = members.peers
        super().__init__(engine, settings, members, slots, number)
        assert isinstance(settings.train_micro_batch_size_per_gpu, int)  # filled in by now
        self.usual_rollouts = settings.train_micro_batch_size_per_gpu
        self.loop_gives_counts = False
        self._gave: set[str] = set()
        self.on_resume: list[Callable[[int], None]] = []
        self.speaks = peers.own == 0
        # With the loss travels what the window has used: the last that is said before a step.
        over = self.over_ranks("sums the loss and metrics of a step", used=True)
        self.meter = Meter(torch.device(engine.device), members.group, over, peers.size)
        by_rollout = settings.lr_progress == "rollout"
        self.boundary = Boundary(self.adapter, self.ledger, self.meter, by_rollout=by_rollout)
        self._division = Division(self.adapter, self.meter, self.ranks, members.summed)
        self._stepped = True
        self._lost = ""  # why the open window can't go on: something in it has raised
        self._finished = False
        self._left: Counts | None = None  # of a micro-batch whose passes() was left before its backward
        self._open_queues: list[Upcoming] = []  # of all passes() that are not at their end: one may stand in another
        self._ran_in: int | None = None
        self.adapter.prepare()
        # DeepSpeed's own boundary follows from its counter; from here on it is marked by hand before every backward.
        self.boundary.mark(False)

    # One pass.

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
        if self.queue is not None:
            counts = self.queue.next_counts()
            given = counts_by_name(rollouts, prompts, tokens, weight)
            refuse_contradiction(counts, given, self.ledger.weighting)
            refuse_missing_terms(self.ledger.weighting, counts, terms)
            return counts
        # Counts that are refused say so, too: nothing can be foretold in such a loop.
        gives = any(number is not None for number in (rollouts, prompts, tokens, weight))
        self.loop_gives_counts = self.loop_gives_counts or gives
        # The other ranks are in this pass, and would wait for its counts.
        with self._telling():
            return self._counts_of_loop(counts_by_name(rollouts, prompts, tokens, weight), terms)

    def refuse_no_loss(self, loss: Any) -> None:
        """Raise WindowError before anything is counted where a loss, or one of its terms, is none."""
        self.adapter.kept.refuse_ended()
        # Inside passes(), and where each backward reduces, the others wait in DeepSpeed by now, and hear nothing there.
        heard = self.queue is None and (self.adapter.silent_inside_windows or not self.settings.by_caller)
        with self._telling() if heard else nullcontext():
            for part in parts_of(loss):
                refuse_what_is_no_loss(part)

    def _counts_of_loop(self, given: Mapping[str, Any], terms: Set[str] | None) -> Counts:
        counts = counts_of(self.settings, self.usual_rollouts, given, self.ledger.weighting, terms or frozenset())
        refuse_missing_terms(self.ledger.weighting, counts, terms)
        refuse_mean_of_parts(self.ledger.weighting, counts, given=terms)
        # An idle pass contains nothing, whether its loop counts or not.
        if counts.active:
            refuse_forgotten(self._gave, given, counts)
            waiting = (one.handed for one in self._open_queues if one.handed is not None)
            if (left := self._left or next(waiting, None)) is not None:
                refuse_left_behind(left, given, counts)
            self._gave.update(given.keys() - {"weight"})
        self._left = None
        return counts

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
        # All modules are looked through, which is not done in every pass. The first one has left gradients here, and
        # where ranks differ, ZeRO 0 would add up others in the boundary's backward (gloo ends a process there).
        self._refuse_strays(newcomers=self.ledger.window.passes == 1)
        self._refuse_idle(counts)
        self._finished = caller is not None  # a framework ends its last window, and never says that it was the last
        if loss is not None and caller is None and self._may_wait_late():
            return self._run_pass_late(loss, counts, **kwargs)
        totals, ahead, whole = self._exchanged(counts, caller)
        window = self._counted(totals, ahead, caller, whole=whole)
        if loss is None:
            self.engine.step()  # moves DeepSpeed's clocks; inside a window it does nothing else
            self._lost = ""
            return None
        self._stepped = False
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
        with self._telling():
            accumulated = self._division.backward(loss, counts, self.ledger.weighting, window, **kwargs)
        self._ran_in = window.index
        if window.passes == 1:
            self.adapter.forget_last_window(steps)
        self._lost = ""
        return accumulated

    def _may_wait_late(self) -> bool:
        """Whether the counts of this pass may be waited for behind its backward, which then does not end the window.

        DeepSpeed must not talk to other ranks in it, or a rank that is elsewhere would be waited for there; and what
        losses are divided by must be known, so the first pass of a window with a gradient waits in front. What may be
        refused because of the counts is refused before there is a gradient.
        """
        ahead = self.queue is not None and (self.exchange.slots > 1 or self.queue.whole_windows)
        # Ranks that share a micro-batch talk to each other inside the model.
        alone = self.over is not None and self.meter.peers == 1
        silent = alone and self.adapter.silent_inside_windows and not self.adapter.reduces_in_hooks
        window = self.ledger.window
        known = window.passes > 0 and window.expected > 0
        refusable = bool(self.settings.overshoot == "error" or self.ledger.promised or self.ledger.weighting.terms)
        return silent and known and not refusable and not ahead and not self.adapter.inside_no_sync

    def _run_pass_late(self, loss: Loss, counts: Counts, **kwargs: Any) -> torch.Tensor:
        """Run a pass whose counts travel while its backward runs; where they close the window, reduce behind it."""
        queue = self.queue
        if queue is None:
            queue = self.upcoming()
            # Also between two ranks: gloo ends a send where the other one receives.
            queue.announce([UpcomingPass(Announcement(counts))]).proceed()
        self._stepped, self._lost = False, PARTLY_THERE
        self.boundary.mark(False)
        try:
            with self._telling():
                accumulated = self._division.backward(loss, counts, self.ledger.weighting, self.ledger.window, **kwargs)
        except Exception:
            # Counted all the same, as on the other ranks: what is loaded over it goes on from the same pass.
            with suppress(RankDesyncError, WindowError):
                self.ledger.count(queue.take(0)[0])
            raise
        window = self.ledger.count(queue.take(0)[0])  # a refusal leaves the window lost: the gradient is there
        self._ran_in = window.index
        if window.closed and self.ledger.total() > 0:
            self.boundary.mark(True)
            self.adapter.reduce()
            self.adapter.kept.after_backward()
        self._lost = ""
        return accumulated

    def _refuse_idle(self, counts: Counts) -> None:
        """Raise WindowError in an idle pass where what other ranks compute depends on this rank's."""
        if self.adapter.experts_apart:
            shared = _SHARED_EXPERTS
        elif self.ranks > 1 and self.adapter.shares_statistics:
            shared = _SHARED_STATISTICS
        else:
            return
        if self.ledger.weighting.silences(counts):
            with self._telling():
                raise WindowError(
                    f"an idle pass with {shared[0]}, so that silencing this rank alone gives a wrong gradient; give "
                    f"every rank as many micro-batches that weigh something, or {shared[1]}"
                )

    def _refuse_strays(self, *, newcomers: bool) -> None:
        with self._telling():
            self.adapter.kept.refuse_freezing(self.ledger.window.index)
            self.adapter.kept.refuse_strays(self.ledger.window.index)
            if newcomers:
                self.adapter.kept.refuse_newcomers()

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
        upcoming.announce([UpcomingPass(Announcement(counts))])
        return (*upcoming.take(0), False)

    def _counted(
        self, totals: PassTotals, ahead: Sequence[PassTotals], caller: CallersBoundary | None, *, whole: bool
    ) -> Window:
        if caller is not None:
            caller.check(totals)
        # Set before it is counted: Ctrl-C may come behind any line, and leave a pass that has no gradient.
        self._lost = PARTLY_THERE
        try:
            window = self.ledger.count(totals, ahead, whole=whole)
        except WindowError:  # it was not
            self._lost = ""
            raise
        return self.ledger.end() if caller is not None and caller.ends else window

    def step(self, **kwargs: Any) -> None:
        """End the pass; at the boundary correct, update, move the scheduler, record.

        Args:
            **kwargs: for DeepSpeed's `step`.

        Raises:
            WindowError: there was no backward since the last step, or it has raised.
        """
        self.adapter.kept.refuse_ended()
        with self._telling():
            self._refuse_lost()
            self._refuse_ending_here()
        if self._stepped:
            raise WindowError(
                f"step() in window {self.ledger.window.index} without a backward() before it: one step() ends one "
                "pass; call it once after every backward()"
            )
        if self.ledger.window.closed:
            self._refuse_strays(newcomers=True)
            self.boundary.schedule()  # one that cannot be moved is refused while step() may come again
        self._stepped = True
        with self._ending():
            if not self.ledger.window.closed:
                self.engine.step(**kwargs)
                return
            queue = None if self.over is None else self.queue  # alone there is nobody to tell
            with announced_early(self.exchange, queue, self.meter, lambda: self._place(RUNS)):
                if self.ledger.total() > 0:
                    self.boundary.update(**kwargs)
                else:
                    self.engine.step(**kwargs)
                    self.boundary.skip()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # What of the step was done is not known, unless its window is settled: a second one would follow it.
            self._lost = PARTLY_DONE if self.ledger.window.closed else self._lost
            raise

    def end_pass(self) -> None:
        """End a pass inside a window without DeepSpeed's `step()`, which there only moves a counter put right later."""
        self._stepped = True

    def refuse_owed_step(self) -> None:
        """Raise WindowError where the pass before waits for its step(): asked before anything is announced or taken."""
        self._refuse_lost()
        if not self._stepped:
            raise WindowError(
                f"backward() in window {self.ledger.window.index} while the pass before it waits for its step(): one "
                "step() ends one pass; call it after every backward()"
            )

    def _refuse_lost(self) -> None:
        if self._lost:
            anew = "" if self.adapter.clears_strays else " (into a new engine, if it was the backward that raised)"
            raise WindowError(
                f"window {self.ledger.window.index} has {self._lost}: load a checkpoint, which throws the window away"
                f"{anew}"
            )

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
        with self._telling():
            own, said = promised(self.ledger.window, self.ledger.weighting, passes, weight, given)
        place = replace(self._place(f"says {', '.join(sorted(said))} of its next window"), pass_index=0)
        self.ledger.promise(Promise(self.exchange.whole_window(place, own), said))

    # Passes that are announced ahead.

    @contextmanager
    def taking_from(self, queue: Upcoming) -> Iterator[None]:
        """Take the passes inside from `queue`, which has announced them."""
        self.queue, self._left = queue, None
        self._open_queues.append(queue)
        self.exchange.early = queue.early is not None
        try:
            yield
        finally:
            self._open_queues.remove(queue)
            # An older generator that is closed late must not end a newer one.
            if self.queue is queue:
                self.queue, self._left = None, queue.handed
                self.exchange.early = False

    def may_skip(self, totals: PassTotals) -> bool:
        """Whether the coming pass, idle on this rank, needs neither forward nor backward here.

        ZeRO 0 and 1 talk to other ranks in the boundary's backward alone, so a rank runs that one. It runs the first
        pass too: without any gradient, stage 0 hangs and stage 1 raises a KeyError. With overlap_comm it runs those
        after it until every parameter has a gradient, because stage 1 reduces only these there.
        """
        inside = self._ran_in == self.ledger.window.index and not self.ledger.closes_with(totals)
        # With SyncBatchNorm the others' forward waits for this rank, which hears there that the pass is refused.
        silent = self.adapter.silent_inside_windows and not self.adapter.shares_statistics
        return inside and silent and self.adapter.has_every_gradient()

    # The end of the data.

    def finish(self) -> None:
        """Settle the window that the data ended in: step, drop or error.

        Raises:
            WindowError: a window is open and `last_window` is `error`, or it has a backward that raised.
            RankDesyncError: not every rank has finished.
        """
        if self.ledger.window.passes:
            self.adapter.kept.refuse_ended()
        with self._telling():
            self._refuse_lost()
            self._refuse_ending_here()
        if not self._stepped:
            raise WindowError("finish() between a backward() and its step(): call step() first")
        # All ranks must end here: one that still runs passes would wait in its own exchange.
        self.exchange.start(self._place("finishes"), []).wait()
        self._finished, self._left = True, None
        window = self.ledger.window
        if window.passes == 0:
            return
        if self.settings.last_window == "error":
            raise WindowError(
                f"the data ended inside window {window.index}: {self.ledger.units()} of {window.target} "
                f"{self.settings.count}s after {window.passes} passes, and ds_parity.last_window is 'error'; feed a "
                "multiple of the target, or choose 'step' or 'drop'"
            )
        self._refuse_strays(newcomers=True)
        if self.settings.last_window == "drop":
            self.ledger.drop()
        self.ledger.end()
        with self._ending():
            if self.ledger.total() == 0:
                self.boundary.skip()
            elif self.settings.last_window == "drop":
                self.boundary.drop()
            else:
                # There is no backward left that could reduce on ZeRO 0 and 1.
                self.boundary.mark(True)
                self.adapter.reduce()
                self.adapter.kept.after_backward()
                self.boundary.update()

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
        # Also before a window's first pass: a stray gradient may be what the loading is to mend.
        with self.adapter.kept.released():
            # DeepSpeed can't clear what a stray has left in its buckets; the next backward says so.
            if not self.adapter.kept.broken:
                self.adapter.discard()
        if self.ledger.window.passes:
            self.boundary.counters.consumed(self.ledger.window.rollouts)
        self.meter.reset()
        self.ledger.restore(self.ledger.state())  # the state knows whole windows only: the open one is gone
        self._stepped, self._lost, self._left = True, "", None
        self._ran_in = None
        self.boundary.mark(False)

    # Small things.

    def stops_here(self) -> bool:
        """Whether a rank has asked to stop and this is a boundary: between windows, the same answer on every rank."""
        return self.exchange.stopping and self._stepped and self.ledger.window.passes == 0

    @property
    def ended(self) -> bool:
        """Whether the run has ended as far as anybody can tell: finished, stopped, or between a framework's windows."""
        return (self._finished and self.ledger.window.passes == 0) or self.stops_here()

    def awaits_step(self) -> bool:
        """Whether a backward() has run whose step() has not."""
        return not self._stepped

    def on_every_rank(self, counts: Counts) -> PassTotals:
        """Return what a pass would contain if every rank's micro-batch contained `counts`."""
        return PassTotals.of([counts] * self.ranks)
