"""Counts over the data-parallel ranks: one small collective on the host, started early and waited for late."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, Final

import torch
import torch.distributed as dist

from ds_parity.engine.ranks.agreement import in_short
from ds_parity.engine.ranks.hostsum import ROOM, HostSum, Rider, Sum
from ds_parity.engine.ranks.wire import (
    MOST_PLANS,
    Announcement,
    GatheredPass,
    Gives,
    Message,
    Peers,
    Place,
    WindowMessage,
)
from ds_parity.errors import RankDesyncError
from ds_parity.window import Counts, Window, WindowTotals

_ALONE = Peers()
_MOST_RANKS = 3
WRONG_PLAN: Final = (
    "a rank trains on its own part of a plan, so that rollouts of the other plan would be trained on twice, or never. "
    "Give plan() the same rollouts in the same order, and the same options, on every rank (gather them first: "
    "torch.distributed.all_gather_object), and micro_batches() the same first_window"
)
"""Why ranks need the same plan, and the way out."""


class Exchange:
    """Sums counts over the data-parallel ranks, and refuses ranks that are out of sync.

    Args:
        over: sums over the ranks; None where there is one rank.
        ranks: how many ranks exchange, those that share a micro-batch included (>= 1).
        slots: passes that one exchange holds (>= 1).
        timeout: seconds that `over` waits, for the message of an error.
        peers: this rank among those that share its micro-batch.
        weights: how many weights a micro-batch brings beside its counts.

    Attributes:
        ranks: how many ranks exchange.
        slots: passes that one exchange holds, the same on every rank.
        collectives: how many collectives were started (a diagnosis is not counted).
        stop: this rank asks all to stop, with the next exchange that it starts.
        stopping: some rank did, as all ranks know it from the same exchange on.
        early: this rank may announce its next passes in the step before them.
        all_early: every rank may, as all ranks know it from the same exchange on.
        plans_in_doubt: some ranks have begun plans and others had not, or other ones, as all ranks know it likewise.
    """

    def __init__(
        self,
        over: HostSum | None,
        ranks: int,
        slots: int,
        timeout: float,
        peers: Peers = _ALONE,
        *,
        weights: int = 0,
    ) -> None:
        self.ranks = ranks
        self._weights = weights
        self.slots = slots
        self.collectives = 0
        self.stop = False
        self.stopping = False
        self.early = False
        self.all_early = False
        self.plans_in_doubt = False
        self._open: Pending | None = None
        self._fits: dict[int, bool] = {}
        self._peers = peers
        self._over = over
        self._timeout = timeout

    def start(self, place: Place, passes: Sequence[Announcement], begun: Sequence[int] = ()) -> Pending:
        """Launch the exchange of up to `slots` passes; it waits for nothing but an exchange that was left unfinished.

        Args:
            place: where this rank is.
            passes: what it announces.
            begun: numbers of the plans that this rank has begun, and of which the others have not heard.

        Raises:
            RankDesyncError: another rank is gone.
        """
        self.settle()
        message = self._message(passes, begun)
        # On the host, because reading a sum from the accelerator would wait for all of its queued work.
        vector = torch.tensor(message.pack(), dtype=torch.float64 if self._weights else torch.int64, device="cpu")
        if self._over is None:
            return Pending(self, place, message, vector)
        self.collectives += 1
        try:
            self._open = Pending(self, place, message, vector, self._over.start(vector, place))
        except RuntimeError as error:
            raise self._gone(place, error) from error
        return self._open

    def settle(self) -> None:
        """Wait for an exchange that a loop has left (`break`), so that all ranks know what was said in it.

        Raises:
            RankDesyncError: ranks are out of sync, or one is gone.
        """
        if self._open is not None:
            self._open.wait()

    def start_early(self, place: Place, passes: Sequence[Announcement] | None) -> Early:
        """Return the numbers of an exchange that may travel with the sum of a step, in place of one of its own.

        Args:
            place: where this rank is.
            passes: that come next, as many as `start` takes; None where this rank does not know them yet.
        """
        message = self._message(passes or ())
        knows = passes is not None
        packed = [float(number) for number in message.pack()]
        numbers = [1.0, *packed] if knows else [0.0] * (1 + len(packed))
        return Early(self, place, message, Rider(torch.tensor(numbers, dtype=torch.float64, device="cpu")))

    @property
    def may_be_early(self) -> bool:
        """Whether all ranks may be early, and have room for what they would say; all know both alike."""
        if self.all_early and self.slots not in self._fits:
            self._fits[self.slots] = 1 + len(self._message(()).pack()) < ROOM
        return self.all_early and self._fits[self.slots]

    def _message(self, passes: Sequence[Announcement], begun: Sequence[int] = ()) -> Message:
        padding = [Announcement(out_of_data=True)] * (self.slots - len(passes))
        stand = 1 + zlib.crc32(repr(tuple(begun)).encode()) % (MOST_PLANS - 1) if begun else 0
        return Message((*passes, *padding), self.stop, self._peers, self._weights, self.early, stand)

    def finish(self, pending: Pending) -> tuple[GatheredPass, ...]:
        """Wait for an exchange; used by `Pending.wait`."""
        if pending.answer is not None:
            return pending.answer
        message, work = pending.message, pending.work
        if self._open is pending:
            self._open = None
        try:
            answer = message.unpack((pending.vector if work is None else work.wait()).tolist())
            if not answer.peers_agree and self._over is not None:
                raise self._peers_differ(self._over, message.passes)
            if not answer.counted_alike and self._over is not None:
                raise _counted_otherwise(self._over, [one.gives for one in message.passes])
        except RuntimeError as error:
            # gloo ends a collective with a RuntimeError where a rank is gone or the time is up.
            raise self._gone(pending.place, error) from error
        self.plans_in_doubt |= 0 < answer.begin < self.ranks or not answer.plans_agree
        self.stopping = self.stopping or answer.stopping
        self.all_early = answer.early == self.ranks
        pending.answer = answer.passes
        return answer.passes

    def whole_window(self, place: Place, own: Window, gives: Gives, rider: Rider | None = None) -> WindowTotals:
        """Return what a window contains over all ranks, each of which says what it has run in it.

        Args:
            place: where this rank is.
            own: the window with what this rank has run.
            gives: how its loop has counted the micro-batches in it.
            rider: numbers of every rank that are summed on the way, where all of them fit into one message.

        Raises:
            RankDesyncError: on every rank, where ranks are out of sync, one is gone, or time ran out.
        """
        message = WindowMessage(own, self._weights, self.stop, self._peers, gives)
        vector = torch.tensor(message.pack(), dtype=torch.float64, device="cpu")
        try:
            if self._over is not None:
                self.collectives += 1
                vector = _summed_together(self._over, vector, place, rider)
            agree, alike, stop, totals = message.unpack(vector.tolist())
            if not agree and self._over is not None:
                held = Counts(own.rollouts, own.prompts, own.tokens)
                raise self._peers_differ(self._over, [Announcement(held)])
            if not alike and self._over is not None:
                raise _counted_otherwise(self._over, [gives])
        except RuntimeError as error:
            raise self._gone(place, error) from error
        self.stopping = self.stopping or stop
        return totals

    def refuse(self, place: Place, error: Exception, most: float | None = None) -> None:
        """Come to the exchange that the others wait in, to say that this rank has raised and trains no further.

        Args:
            place: where it has.
            error: what it has raised.
            most: seconds to wait for them (> 0), after which they are told if they come; None: the time limit.
        """

        def tell() -> None:
            with suppress(RankDesyncError):
                told.wait()

        with suppress(RankDesyncError):
            told = self.start(replace(place, error=in_short(error)), [])
            if most is None:
                tell()
                return
            waiting = Thread(target=tell, name="ds_parity tells of an error", daemon=True)
            waiting.start()
            waiting.join(most)

    def _peers_differ(self, over: HostSum, passes: Sequence[Announcement]) -> RankDesyncError:
        gathered = over.gathered((self._peers.first, dist.get_rank(), list(passes)))
        by_group: dict[int, list[Any]] = {}
        for first, _, announced in gathered:
            by_group.setdefault(first, []).append(announced)
        differing = {first for first, all_of in by_group.items() if any(one != all_of[0] for one in all_of)}
        lines = "; ".join(
            f"rank {rank} {', '.join(f'{one.counts}' for one in announced if not one.out_of_data) or 'none'}"
            for first, rank, announced in gathered
            if first in differing
        )
        return RankDesyncError(
            f"ranks that share a micro-batch passed different counts: {lines}. By sequence parallelism they hold "
            "slices of it, and all of it where each has a part of the model (AutoTP, an mpu). It counts once: pass the "
            "counts of the whole micro-batch on each of them"
        )

    def _gone(self, place: Place, error: RuntimeError) -> RankDesyncError:
        return RankDesyncError(
            f"rank {dist.get_rank()} {place.kind}, and waited in window {place.window}, pass {place.pass_index}, for "
            f"the counts of the other {self.ranks - 1} ranks, up to {self._timeout:g} s (ds_parity.exchange_timeout): "
            "one of them ended, or runs a different number of passes. Call idle() on ranks without data, or take "
            f"micro-batches from passes(), which does. ({str(error).splitlines()[0]})"
        )


def _counted_otherwise(over: HostSum, own: Sequence[Gives]) -> RankDesyncError:
    """Return what to raise on every rank where one gives the rollouts of its micro-batches, and another never does."""
    gathered = over.gathered((dist.get_rank(), Gives.NEVER in own))
    leaving = [str(rank) for rank, never in gathered if never]
    others = f", and {len(leaving) - _MOST_RANKS} more" if len(leaving) > _MOST_RANKS else ""
    return RankDesyncError(
        f"rollouts= is left out on rank {', '.join(leaving[:_MOST_RANKS])}{others}, and given on others, in one "
        "window: what is left out counts as usual (train_micro_batch_size_per_gpu), whatever the micro-batch contains. "
        "Give rollouts= on every rank, or call idle(loss) where a rank has no micro-batch"
    )


def _summed_together(over: HostSum, vector: torch.Tensor, place: Place, rider: Rider | None) -> torch.Tensor:
    """Return the sum of the vector; a rider's numbers travel with it where there is room for all of them."""
    if rider is None or rider.numbers.numel() + vector.numel() > ROOM:
        return over.start(vector, place, greatest=1).wait()
    summed = over.start(torch.cat([rider.numbers, vector]), place, greatest=1).wait()
    own = rider.numbers.numel()
    rider.summed = summed[:own]
    return summed[own:]


@dataclass(slots=True)
class Pending:
    """An exchange under way."""

    exchange: Exchange
    place: Place
    message: Message
    vector: torch.Tensor
    work: Sum | None = None
    answer: tuple[GatheredPass, ...] | None = None

    def proceed(self) -> None:
        """Answer ranks that wait for it from now on, whatever this one does before it waits."""
        if self.work is not None:
            self.work.proceed()

    def wait(self) -> tuple[GatheredPass, ...]:
        """Return what the passes contain over all ranks.

        Raises:
            RankDesyncError: on every rank, where ranks are out of sync, one is gone, or time ran out.
        """
        return self.exchange.finish(self)


@dataclass(slots=True)
class Early:
    """An exchange that travels with the sum of a step, where all ranks know their next passes by then.

    Attributes:
        rider: its numbers: 1 and the message; zeros on a rank that does not know its next passes yet.
    """

    exchange: Exchange
    place: Place
    message: Message
    rider: Rider

    def arrived(self) -> Pending | None:
        """Return the exchange, which waits for nothing any more; None, on every rank alike, where it must be repeated.

        It must, where the numbers had no room in the sum, a rank did not know its passes, or ranks that share a
        micro-batch said different things of it, which the repetition explains.
        """
        if self.rider.summed is None:
            return None
        knowing, *sums = self.rider.summed.tolist()
        if knowing != self.exchange.ranks or not (answer := self.message.unpack(sums)).peers_agree:
            return None
        # Now, and not where the passes are learned: the window ends here, and nothing may be asked for behind it.
        self.exchange.stopping = self.exchange.stopping or answer.stopping
        return Pending(self.exchange, self.place, self.message, self.rider.summed[1:])
