"""One pass after another: count, divide, run, and close the window at its boundary. The only place that orders them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_parity.config import Settings
from ds_parity.engine.boundary import Boundary
from ds_parity.engine.internals.groups import members_of
from ds_parity.engine.internals.leftout import forget_last_window
from ds_parity.engine.internals.normalize import (
    averaged_over,
    discard_accumulated,
    divisor,
    has_every_gradient,
    keep_clip_norm,
    reduce_accumulated,
    silenced,
    unscaled_loss_scale,
)
from ds_parity.engine.ranks.agreement import same
from ds_parity.engine.ranks.exchange import Exchange, Known, Pending, Place, Slot, host_group
from ds_parity.engine.record.metrics import Meter
from ds_parity.errors import WindowError
from ds_parity.window import Counts, Ledger, PassTotals, Rules


class Driver:
    """Drives a DeepSpeed engine by the rollouts that the whole cluster has consumed.

    Args:
        engine: the bare DeepSpeed engine.
        settings: the extra keys.
        slots: passes that one exchange holds.
        sequence: sequence-parallel size that the engine was asked for.

    Attributes:
        engine: the bare DeepSpeed engine.
        settings: the extra keys.
        usual_rollouts: what a micro-batch holds where nobody says.
        ledger: windows, totals and clocks.
        ranks: data-parallel ranks.
        host_group: a gloo group of them and those that share their micro-batches; None for one rank.
        speaks: whether this rank stands for those that share its micro-batch.
        meter: the window's loss and metrics.
        boundary: what closing a window does: DeepSpeed's counters, the scheduler and the last step are there.
        exchange: counts over the data-parallel ranks.
        on_resume: called with the windows closed so far, once a checkpoint has put them back.
    """

    def __init__(self, engine: Any, settings: Settings, slots: int, sequence: int = 1) -> None:
        members = members_of(engine, sequence)
        group, peers = members.group, members.peers
        self.engine = engine
        self.settings = settings
        self.usual_rollouts = settings.target // settings.gradient_accumulation_passes
        self.ranks = members.ranks
        self.ledger = Ledger(
            Rules(settings.target, self.ranks, settings.count, settings.overshoot, settings.loss_weight)
        )
        together = self.ranks * peers.size
        self.host_group = host_group(group, settings.exchange_timeout) if together > 1 else None
        self.exchange = Exchange(self.host_group, together, slots, settings.exchange_timeout, peers)
        self.on_resume: list[Callable[[int], None]] = []
        self._configuration = settings.fingerprint
        self._averaged_over = averaged_over(engine, self.ranks, peers.size)
        self._peers = peers.size
        self.speaks = peers.own == 0
        self.meter = Meter(torch.device(engine.device), group, self.host_group, peers.size)
        self.boundary = Boundary(engine, self.ledger, self.meter, by_rollout=settings.lr_progress == "rollout")
        self._stepped = True
        self._silent_inside = engine.zero_optimization_stage() < 2 and not engine.has_moe_layers
        self._ran_in: int | None = None
        keep_clip_norm(engine)
        self.boundary.mark(False)

    # One pass.

    def refuse_owed_step(self) -> None:
        """Raise WindowError where the pass before waits for its step(): asked before anything is announced or taken."""
        if not self._stepped:
            raise WindowError(
                f"backward() in window {self.ledger.window.index} while the pass before it waits for its step(): one "
                "step() ends one pass; call it after every backward()"
            )

    def announce(self, slots: Sequence[Slot], doing: str = "runs a pass") -> Pending:
        """Start the exchange of this rank's next passes; all ranks must be `doing` the same."""
        return self.exchange.start(self._place(doing), slots)

    def take_shares(self) -> None:
        """Take losses from here on as their caller has divided them: summed over passes, averaged over ranks.

        Between windows only: a window has one denominator.
        """
        self.settings = self.settings.model_copy(update={"loss_weight": "share", "loss_reduction": "mean"})
        self.ledger.rules = replace(self.ledger.rules, loss_weight="share")

    def refuse(self, error: Exception, *, ahead: bool) -> None:
        """Tell the other ranks that this one has raised in place of announcing its next passes.

        Without look-ahead they are in a forward, where ZeRO 3 waits for this rank: they hear of it when it ends.
        """
        if ahead or self.engine.zero_optimization_stage() < 3:
            self.exchange.refuse(self._place("reads its passes"), error)

    def look_ahead(self, passes: int) -> None:
        """Exchange so many passes together from here on.

        Raises:
            RankDesyncError: ranks were given different numbers.
        """
        if passes != self.exchange.slots:
            if self.host_group is not None:  # exchanges of different sizes end a gloo process at once
                same(self.host_group, "look-ahead", passes)
            self.exchange.slots = passes

    def slot(self, counts: Counts) -> Slot:
        """Return the announcement of one pass of this rank.

        Raises:
            WindowError: its loss is a mean over rollouts, of which it holds parts alone.
        """
        self.refuse_mean_of_parts(counts)
        return Slot(counts, active=counts.active)

    def refuse_mean_of_parts(self, counts: Counts, sequences: int = 0) -> None:
        """Raise WindowError where a loss is a mean over rollouts, of some of which the micro-batch holds parts alone.

        Args:
            counts: what it holds.
            sequences: of how many sequences it consists, 0 where nobody knows.
        """
        settings = self.settings
        parts = sequences > counts.rollouts or (counts.active and not counts.rollouts)
        if parts and settings.loss_reduction == "mean" and settings.loss_weight in ("rollout", "target"):
            raise WindowError(
                f"a micro-batch of {counts.tokens} loss tokens{f' in {sequences} sequences' if sequences else ''} finishes "
                f"{counts.rollouts} rollouts, and ds_parity.loss_weight {settings.loss_weight!r} with loss_reduction 'mean' "
                "says that its loss is a mean over the rollouts that it finishes: turns that are not their rollout's last "
                "would weigh nothing. Choose loss_weight 'token', or loss_reduction 'sum' with a loss that adds up each "
                "turn's share of its rollout; an idle pass has no tokens"
            )

    def backward(
        self,
        loss: torch.Tensor,
        own: Counts,
        known: Known,
        ahead: Sequence[PassTotals],
        *,
        ends: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run one backward, divided by the expected total; return the loss as it was accumulated.

        Args:
            loss: scalar.
            own: what the micro-batch of this rank holds.
            known: what the pass holds over all ranks.
            ahead: what is known of the passes after it.
            ends: the pass ends its window, also short of the target.
            **kwargs: for DeepSpeed's `backward`.

        Raises:
            WindowError: it would close a window inside no_sync().
        """
        window = self.ledger.count(known.totals, ahead)
        if ends:
            window = self.ledger.end()
        self._stepped = False
        boundary = window.closed and self.ledger.total() > 0
        if boundary and self.engine.inside_no_sync_ctxt:
            raise WindowError(
                f"backward() inside no_sync() in the pass that closes window {window.index}: its gradients would not be "
                "reduced, and ranks would part; leave no_sync() out, DeepSpeed communicates only where it must"
            )
        self.boundary.mark(boundary)
        accumulated = self._accumulate(loss, own, window.expected, **kwargs)
        self._ran_in = window.index
        if window.passes == 1:
            forget_last_window(self.engine, boundary)
        return accumulated

    def _accumulate(self, loss: torch.Tensor, own: Counts, expected: float, **kwargs: Any) -> Any:
        weight, by_sum = own.weight(self.settings.loss_weight), self.settings.loss_reduction == "sum"
        if weight == 0 and not (by_sum and own.tokens):
            with silenced(self.engine.module):
                self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
            return torch.zeros_like(loss)
        self.meter.add(loss, 1 if by_sum else weight)
        scaled = loss / divisor(expected, weight, self._averaged_over, self.settings.loss_reduction, self._peers)
        scale = unscaled_loss_scale(self.engine)
        if scale == 1:
            return self.engine.backward(scaled, scale_wrt_gas=False, **kwargs)
        self.engine.backward(scaled.float() * scale, scale_wrt_gas=False, **kwargs)
        return scaled

    def step(self, **kwargs: Any) -> None:
        """End the pass; at the boundary correct, update, move the scheduler, record.

        Raises:
            WindowError: there was no backward since the last step.
        """
        if self._stepped:
            raise WindowError(
                f"step() in window {self.ledger.window.index} without a backward() before it: one step() ends one pass; "
                "call it once after every backward()"
            )
        self._stepped = True
        if not self.ledger.window.closed:
            self.engine.step(**kwargs)
        elif self.ledger.total() > 0:
            self.boundary.update(**kwargs)
        else:
            self.engine.step(**kwargs)
            self.boundary.skip()

    def end_pass(self) -> None:
        """End a pass inside a window without DeepSpeed's `step()`, which there only moves a counter put right later."""
        self._stepped = True

    def may_skip(self, held: PassTotals) -> bool:
        """Whether the coming pass, idle on this rank, needs neither forward nor backward here.

        ZeRO 0 and 1 talk to other ranks in the boundary's backward alone, so a rank runs that one. It runs the first pass
        too, and those after it until every parameter has a gradient: without any, stage 0 hangs and stage 1 raises a
        KeyError, and stage 1 reduces only parameters that have one.
        """
        if not self._silent_inside or self._ran_in != self.ledger.window.index or self.ledger.closes_with(held):
            return False
        return has_every_gradient(self.engine)

    def skip(self, known: Known, ahead: Sequence[PassTotals]) -> None:
        """Count an idle pass that other ranks run.

        Raises:
            WindowError: the pass before waits for its step().
        """
        self.refuse_owed_step()
        self.ledger.count(known.totals, ahead)
        self.engine.step()  # DeepSpeed's clocks; at no boundary it does nothing else

    def on_every_rank(self, held: Counts) -> PassTotals:
        """Return what a pass would hold if every rank held this."""
        return PassTotals.of([held] * self.ranks)

    # The end of the data.

    def finish(self) -> None:
        """Settle the window that the data ended in: step, drop or error.

        Raises:
            WindowError: a window is open and `last_window` is `error`.
            RankDesyncError: not every rank has finished.
        """
        if not self._stepped:
            raise WindowError("finish() between a backward() and its step(): call step() first")
        self.exchange.start(self._place("finishes"), []).wait()
        window = self.ledger.window
        if window.passes == 0:
            return
        if self.settings.last_window == "error":
            raise WindowError(
                f"the data ended inside window {window.index}: {self.ledger.units()} of {window.target} "
                f"{self.settings.count}s after {window.passes} passes, and ds_parity.last_window is 'error'; feed a "
                "multiple of the target, or choose 'step' or 'drop'"
            )
        self.ledger.end()
        if self.ledger.total() == 0:
            self.boundary.skip()
        elif self.settings.last_window == "drop":
            self.boundary.drop()
        else:
            self.boundary.mark(True)
            reduce_accumulated(self.engine)
            self.boundary.update()

    def abandon(self) -> None:
        """Throw the open window away, gradients, losses and metrics with it: what comes next is loaded over it."""
        if self.ledger.window.passes:
            discard_accumulated(self.engine)
            self.boundary.counters.consumed(self.ledger.window.rollouts)
        self.meter.reset()
        self.ledger.restore(self.ledger.state())  # the state knows whole windows only: the open one is gone
        self._stepped = True
        self._ran_in = None
        self.boundary.mark(False)

    # Small things.

    def stops_here(self) -> bool:
        """Whether a rank has asked to stop and this is a boundary: between windows, the same answer on every rank."""
        return self.exchange.stopping and self._stepped and self.ledger.window.passes == 0

    def awaits_step(self) -> bool:
        """Whether a backward() has run whose step() has not."""
        return not self._stepped

    def _place(self, kind: str) -> Place:
        return Place(kind, self.ledger.window.index, self.ledger.passes, self._configuration)
