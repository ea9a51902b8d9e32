"""A sum of small vectors over ranks, on the host, in log2(ranks) rounds that start before anybody waits.

Recursive doubling (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
section 4): in round k every rank swaps its partial sum with the rank whose number differs in bit k. Ranks beyond the
largest power of two hand their vector to one below it first, and receive the sum last. gloo's own all_reduce goes round
a ring, in a number of steps that grows with the ranks; for two it took 1.5 ms here, where this takes 0.1 ms.

Whatever ranks do together in a group begins with such a sum, which says where each of them is: ranks that come for
different things meet in it, and each hears of it. gloo ends a process that receives more than it has room for, so every
message has room for `CAPACITY` numbers; what is longer follows once all ranks were seen to send as much.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from threading import get_ident
from typing import Any, Final

import torch
import torch.distributed as dist

from ds_parity.engine.ranks.helper import Helper
from ds_parity.engine.ranks.limits import Limit
from ds_parity.engine.ranks.wire import LOADS, RUNS_WHOLE, SAVES, Place, differing_rates, heads_agree
from ds_parity.errors import RankDesyncError, WindowError

CAPACITY: Final = 128  # numbers of 8 bytes: 20 passes, or 60 metrics; more memory would show beside small models
_HEADS: Final = 2  # what Place.head returns
ROOM: Final = CAPACITY - _HEADS
"""How many numbers travel in one message."""
# The sum under way in each group. One that nobody waited for (a loop that was left) is waited for before the next
# starts: its messages would be taken for the next one's.
_RUNNING: dict[Any, Sum] = {}


@dataclass(slots=True)
class Rider:
    """Numbers that wait for a sum, and travel with one that is due before.

    Attributes:
        numbers: this rank's, (n,) float64, n the same on every rank.
        summed: over all ranks, once they have travelled.
    """

    numbers: torch.Tensor
    summed: torch.Tensor | None = None


class HostSum:
    """Sums and gathers over a gloo group; one at a time, whoever starts it.

    Args:
        group: a gloo process group.
        timeout: seconds that each wait may take; None: as long as the group's own.

    Attributes:
        collectives: how many sums and gathers were started, a diagnosis not counted.
    """

    def __init__(self, group: Any, timeout: float | None = None) -> None:
        self.collectives = 0
        self._group = group
        self._timeout = timeout
        self._members = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        self._core = core_of(len(self._members))

    def start(self, vector: torch.Tensor, place: Place, *, greatest: int = 0) -> Sum:
        """Send what can be sent at once; every rank of the group calls, with vectors of one shape and type.

        Args:
            vector: (n,) int64 or float64, on the host.
            place: where this rank is; all must be there.
            greatest: of the last so many numbers the greatest is returned, and not their sum.

        Raises:
            RuntimeError: a rank is gone.
            RankDesyncError: a sum that was left unfinished found ranks in different places.
        """
        # Messages carry no number of their sum, so two sums in one group would mix.
        left = _RUNNING.get(self._group)
        if left is not None:
            left.wait()
        self.collectives += 1
        _RUNNING[self._group] = running = Sum(self, vector, place, greatest)
        running.begin()
        return running

    def gather(self, value: Any, place: Place) -> list[Any]:
        """Return the values of all ranks, once they were seen to be in one place.

        Raises:
            RuntimeError: a rank is gone.
            RankDesyncError: ranks are in different places.
        """
        self.start(torch.zeros(0, dtype=torch.int64, device="cpu"), place).wait()
        return self.gathered(value)

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which must be known to come here together."""
        values: list[Any] = [None] * len(self._members)
        # Waits between two ranks are given their limit one by one, a gather takes that of the group.
        with nullcontext() if self._timeout is None else Limit([self._group], self._timeout).applied():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def out_of_sync(self, place: Place, length: int) -> RankDesyncError:
        """Return the error that says where all ranks are, once they know that they are not in one place."""
        gathered = self.gathered((dist.get_rank(), place, length))
        lines = "; ".join(f"rank {rank} {where}" for rank, where, _ in gathered)
        places = [where for _, where, _ in gathered]
        if any(where.error for where in places):
            return RankDesyncError(f"this rank stops because another did: {lines}. Mend what it says")
        if len({where.engine for where in places}) > 1:
            rule = (
                "Every rank must initialize its engines, and run their passes, in the same order: engine 1 is the one "
                "that was initialized first"
            )
        elif len(kinds := {where.kind for where in places}) > 1 and kinds & {SAVES, LOADS}:
            rule = (
                "Every rank must call save_checkpoint() and load_checkpoint(), at the same place of its loop, because "
                "each writes and reads a part: leave conditions such as `if rank == 0` out"
            )
        elif (
            len({where.rates for where in places}) > 1
            and len({replace(where, rates=(), used=0) for where in places}) == 1
        ):
            apart = differing_rates({rank: where.rates for rank, where, _ in gathered})
            return _at_one_place(
                f"ranks differ in {apart}. So the step would be another one on each rank. The weights are as they "
                "were. Give the scheduler the same metric on every rank (an average over them), and set learning "
                "rates, and whatever else is named here, on all of them alike"
            )
        elif len({replace(where, used=0) for where in places}) == 1 and len(set(places)) > 1:
            return _at_one_place(
                f"ranks are not in the same place: {lines}. "
                "The passes of a window used different parameters on these ranks, or the same ones in another order "
                "(each checksum stands for them and their order), and ZeRO stage 1 to 3 add gradients up in their "
                "order, those of one parameter to those of another; or they have frozen different ones, which no stage "
                "allows. The weights are as they were. Freeze the same on every rank. Use every parameter "
                "in every pass on every rank, in the same order: run all branches one after the other, and multiply by "
                "0 what a branch gives that is not wanted (on stage 3, a layer of experts can be a leaf module: "
                "zero_optimization.leaf_module), or use ZeRO stage 0. A recurrent layer over packed sequences has its "
                "gradients in another order where all have one length: use stage 0 or 1. On stage 3 go on with a new "
                "engine and a checkpoint: DeepSpeed remembers there which modules ran"
            )
        elif RUNS_WHOLE in kinds and len(kinds) > 1:
            rule = "Every rank must give passes() the same lookahead, and take its micro-batches from passes()"
        elif len(set(places)) == 1:
            lengths = ", ".join(f"rank {rank} {length}" for rank, _, length in gathered)
            rule = f"They sum different amounts of numbers there ({lengths}): look at what each rank was started with"
        else:
            rule = (
                "Every rank must run the same number of passes with the same configuration: call idle() on ranks "
                "without data, or take micro-batches from passes(), which does"
            )
        return RankDesyncError(f"ranks are not in the same place: {lines}. {rule}")

    def lost(self) -> None:
        """Let all ranks know that a rank of this group was lost, so that the next engine is given another group."""
        with suppress(RuntimeError, ValueError):  # the store may be gone with the rank, or with the process group
            _store().set(_lost_key(self._group), "")

    def ended(self, running: Sum) -> None:
        """Note that a sum has come to its end, or failed."""
        if _RUNNING.get(self._group) is running:
            del _RUNNING[self._group]

    @property
    def ranks(self) -> int:
        """How many ranks sum (>= 1)."""
        return len(self._members)

    @cached_property
    def helper(self) -> Helper:
        """The thread that goes on with sums; one is enough, because they come one at a time."""
        return Helper()

    def partner(self, round_number: int) -> int | None:
        """Return whom this rank swaps with in a round, None after the last one."""
        bit = 1 << round_number
        return self._rank ^ bit if bit < self._core else None

    @property
    def beyond(self) -> bool:
        """Whether this rank lies beyond the largest power of two."""
        return self._rank >= self._core

    @property
    def fold(self) -> int | None:
        """The rank that is folded with this one, on the other side of the power of two; None without one."""
        other = self._rank - self._core if self.beyond else self._rank + self._core
        return other if other < len(self._members) else None

    def send(self, vector: torch.Tensor, to: int, tag: int) -> Callable[[], object]:
        """Send without waiting; returns what waits for it, and until then the vector must stay as it is."""
        work: Any = dist.isend(vector, self._members[to], group=self._group, tag=tag)
        return lambda: self._wait(work)

    def receive(self, length: int, source: int, tag: int) -> torch.Tensor:
        """Wait for a vector of another rank, and return its first numbers; zeros where it sent fewer."""
        # A buffer of its own: the vector that was sent must stay as it is until the send is done.
        received = torch.zeros(max(length, CAPACITY), dtype=torch.int64, device="cpu")
        self._wait(dist.irecv(received, self._members[source], group=self._group, tag=tag))
        return received[:length]

    def _wait(self, work: Any) -> None:
        work.wait() if self._timeout is None else work.wait(timedelta(seconds=self._timeout))


class PlacedSum:
    """Sums and gathers of something that knows no place.

    Args:
        over: the ranks.
        place: returns where this rank is.
    """

    def __init__(self, over: HostSum, place: Callable[[], Place]) -> None:
        self._over = over
        self._place = place

    @property
    def ranks(self) -> int:
        """As `HostSum.ranks`."""
        return self._over.ranks

    def start(self, vector: torch.Tensor) -> Sum:
        """As `HostSum.start`."""
        return self._over.start(vector, self._place())

    def gather(self, value: Any) -> list[Any]:
        """As `HostSum.gather`."""
        return self._over.gather(value, self._place())

    def gathered(self, value: Any) -> list[Any]:
        """As `HostSum.gathered`: right behind a sum, in which all ranks were seen to be here."""
        self._over.collectives += 1
        return self._over.gathered(value)


def summed_with(rider: Rider | None, vector: torch.Tensor, over: PlacedSum) -> torch.Tensor:
    """Return the sum of a vector; a rider's numbers travel with it where there is room for all of them.

    Args:
        rider: on every rank or on none, with as many numbers.
        vector: (n,) float64, on the host.
        over: the ranks.
    """
    if rider is None or rider.numbers.numel() + vector.numel() > ROOM:
        return over.start(vector).wait()
    together = over.start(torch.cat([rider.numbers, vector])).wait()
    own = rider.numbers.numel()
    rider.summed = together[:own]
    return together[own:]


def is_lost(group: Any) -> bool:
    """Whether some rank has lost another in a group: gloo closes a connection whose time is up, for good."""
    return bool(_store().check([_lost_key(group)]))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _lost_key(group: Any) -> str:
    return f"ds_parity/lost/{group.group_name}"


def _at_one_place(message: str) -> RankDesyncError:
    """Return an error that all ranks raise at one place, and may go on from alike."""
    error = RankDesyncError(message)
    error.parted = False
    return error


def core_of(ranks: int) -> int:
    """Return the largest power of two that is not greater than `ranks` (>= 1)."""
    return 1 << (ranks.bit_length() - 1)


class Sum:
    """One sum under way."""

    _FOLD, _UNFOLD, _SECOND = 62, 63, 64  # tags; rounds use their number, and what follows the first part adds 64

    def __init__(self, over: HostSum, vector: torch.Tensor, place: Place, greatest: int = 0) -> None:
        assert not greatest or vector.numel() <= ROOM, "what follows in a second part is summed"
        self._greatest = greatest
        self._over = over
        self._place = place
        self._type = vector.dtype
        heads = torch.tensor(place.head(vector.numel()), dtype=torch.int64, device="cpu")
        # Numbers of either type have 8 bytes, so that they travel in one message.
        self._message = torch.cat([heads, vector.view(torch.int64)])
        self._sent: list[Callable[[], object]] = []
        self._result: Future[torch.Tensor] | None = None
        self._worker: int | None = None
        self._interrupted = False

    def begin(self) -> None:
        """Send the first vector, where nothing has to come in before."""
        self._begin(self._message[:CAPACITY], 0)

    def proceed(self) -> None:
        """Go on in a thread: a rank that waits for the sum must not wait for what this one does before it waits too."""
        if self._result is None:
            self._result = Future()
            self._over.helper.give(partial(self._come_to_an_end, self._result))

    def failure(self, within: float) -> RankDesyncError | None:
        """Return what ranks in different places were told, if the sum goes on in a thread and has heard of it.

        Args:
            within: seconds to wait for it at most.
        """
        with suppress(TimeoutError):
            error = None if self._result is None else self._result.exception(within)
            return error if isinstance(error, RankDesyncError) else None
        return None

    def wait(self) -> torch.Tensor:
        """Return the sum; again, where it is asked again.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
            RankDesyncError: ranks are in different places.
            WindowError: this thread is inside the sum already: a signal handler was called there.
        """
        if self._worker == get_ident():
            raise WindowError(
                "a call that talks to other ranks was made in a signal handler, while the loop itself waits for them: "
                "neither could go on; set a flag in the handler, or call engine.stop(), and let the loop see to it "
                "between two passes"
            )
        # Without proceed() the waiting thread does the rounds itself.
        if self._result is None:
            self._result = Future()
            self._come_to_an_end(self._result)
        answer = self._result
        try:
            return answer.result()
        finally:
            if answer.done() and not self._interrupted:
                self._over.ended(self)

    def _come_to_an_end(self, result: Future[torch.Tensor]) -> None:
        self._worker = get_ident()
        try:
            result.set_result(self._summed())
        except RuntimeError as error:
            try:
                self._over.lost()
            finally:  # whoever waits must hear of it, whatever has become of the store
                result.set_exception(error)
        except Exception as error:
            result.set_exception(error)
        except BaseException:  # Ctrl-C: who knows which messages have come in
            self._interrupted = True
            result.set_exception(RuntimeError("an exchange was interrupted, and no other can follow it: start again"))
            raise
        finally:
            self._worker = None

    def _summed(self) -> torch.Tensor:
        first = self._rounds(self._message[:CAPACITY], 0)
        # Each rank finds out from the same sums, so all of them come to the diagnosis.
        if not heads_agree(first[:_HEADS].tolist(), self._over.ranks):
            raise self._over.out_of_sync(self._place, self._message.numel() - _HEADS)
        rest = self._message[CAPACITY:]
        if rest.numel():
            self._begin(rest, self._SECOND)
            first = torch.cat([first, self._rounds(rest, self._SECOND)])
        return first[_HEADS:].view(self._type)

    def _begin(self, vector: torch.Tensor, tag: int) -> None:
        over, first = self._over, self._over.partner(0)
        if over.beyond:
            assert over.fold is not None
            self._sent.append(over.send(vector, over.fold, tag + self._FOLD))
        # A rank with a folded partner must add its vector first, and so can send nothing yet.
        elif over.fold is None and first is not None:
            self._sent.append(over.send(vector, first, tag))

    def _rounds(self, vector: torch.Tensor, tag: int) -> torch.Tensor:
        over = self._over
        if over.beyond:
            assert over.fold is not None
            vector = over.receive(vector.numel(), over.fold, tag + self._UNFOLD)
        else:
            vector = self._doubled(vector, tag)
        # Every send must be done before the next sum reuses its tag.
        for wait in self._sent:
            wait()
        self._sent.clear()
        return vector

    def _doubled(self, vector: torch.Tensor, tag: int) -> torch.Tensor:
        over, fold, number = self._over, self._over.fold, 0
        if fold is not None:
            vector = self._added(vector, over.receive(vector.numel(), fold, tag + self._FOLD), tag)
        while (partner := over.partner(number)) is not None:
            if number or fold is not None:
                self._sent.append(over.send(vector, partner, tag + number))
            vector = self._added(vector, over.receive(vector.numel(), partner, tag + number), tag)
            number += 1
        if fold is not None:
            self._sent.append(over.send(vector, fold, tag + self._UNFOLD))
        return vector

    def _added(self, mine: torch.Tensor, theirs: torch.Tensor, tag: int) -> torch.Tensor:
        if self._type == torch.int64 and not self._greatest:
            return mine + theirs
        heads = 0 if tag else _HEADS  # the first part alone has them
        own, others = mine[heads:].view(self._type), theirs[heads:].view(self._type)
        body = own + others
        if self._greatest:
            body[-self._greatest :] = torch.maximum(own, others)[-self._greatest :]
        return torch.cat([mine[:heads] + theirs[:heads], body.view(torch.int64)])
