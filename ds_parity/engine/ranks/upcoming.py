"""The next passes of this rank: announced together, and taken one by one with what all ranks know of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import get_ident
from typing import Any, Protocol

from ds_parity.engine.ranks.exchange import Pending
from ds_parity.engine.ranks.wire import Announcement, GatheredPass
from ds_parity.errors import RankDesyncError, WindowError
from ds_parity.window import Counts, PassTotals


@dataclass(slots=True, eq=False)
class UpcomingPass:
    """A pass of this rank that has not been run.

    Attributes:
        announcement: what the other ranks hear of it.
        batch: the micro-batch that runs in it, where `passes()` hands one out, until it has done so.
        gathered: what all ranks contain in it, once that was waited for.
    """

    announcement: Announcement
    batch: Any = None
    gathered: GatheredPass | None = None

    @property
    def counts(self) -> Counts:
        """What this rank's micro-batch contains."""
        return self.announcement.counts


class ReadEarly(Protocol):
    """Knows the passes that come next, where they were made in a thread, before anybody takes them."""

    def known(self) -> Sequence[UpcomingPass] | None:
        """Return what would be announced next, and take nothing; None where it is not known yet."""

    def take(self) -> None:
        """Take what `known` has returned last."""


class Upcoming:
    """Passes in their order, with at most one exchange under way.

    Args:
        start: starts the exchange of some passes, given the numbers of the plans that this rank has begun.
        ranks: data-parallel ranks (>= 1).

    Attributes:
        all_out_of_data: every rank has announced a pass without a micro-batch: there are no more.
        whole_windows: a window's passes are all known before its first one runs.
        settles: the window that the streams end in ends there, too; else it goes on with other passes.
        early: what knows the passes that come next before they are announced; None without such.
        awaits_backward: counts of the micro-batch that was handed out and had no backward yet; None without such.
    """

    def __init__(self, start: Callable[[Sequence[Announcement], Sequence[int]], Pending], ranks: int) -> None:
        self.all_out_of_data = False
        self.whole_windows = False
        self.settles = True
        self.early: ReadEarly | None = None
        self._start = start
        self._ranks = ranks
        self._passes: deque[UpcomingPass] = deque()
        self._pending: Pending | None = None
        self._announced: Sequence[UpcomingPass] = ()
        self.awaits_backward: Counts | None = None
        # Also behind its backward: what is recorded then belongs to it.
        self._handed_out_last: Counts | None = None
        self._handed_out_to: int | None = None  # the thread that asked for it

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def first(self) -> UpcomingPass:
        """The pass that runs next; there must be one."""
        return self._passes[0]

    def hand_out(self) -> Any:
        """Return the micro-batch of the pass that runs next, and let go of it: it is the loop's from now on."""
        first = self.first
        self.awaits_backward = self._handed_out_last = first.counts
        self._handed_out_to = get_ident()
        batch, first.batch = first.batch, None
        return batch

    @property
    def idle(self) -> bool:
        """Whether the calling thread runs an idle pass: what was handed out to it last is a stand-in."""
        return self._handed_out_last == Counts() and self._handed_out_to == get_ident()

    def announce(self, passes: Sequence[UpcomingPass], begun: Sequence[int] = ()) -> Pending:
        """Start the exchange of these passes, which come after those that were announced before.

        Args:
            passes: the passes.
            begun: numbers of the plans that this rank has begun, and of which the others have not heard.
        """
        pending = self._start([one.announcement for one in passes], begun)
        self.announced(passes, pending)
        return pending

    def announced(self, passes: Sequence[UpcomingPass], pending: Pending) -> None:
        """Take note of passes, which come after those before, and of the exchange in which they were announced."""
        self._announced, self._pending = passes, pending
        self._passes.extend(passes)

    def learn(self) -> None:
        """Wait for the exchange that is under way, if there is one.

        Raises:
            RankDesyncError: ranks are out of sync.
            WindowError: a rank has nothing to run in an idle pass.
        """
        if self._pending is None:
            return
        answer, self._pending = self._pending.wait(), None
        # An exchange has as many places as the look-ahead; a loop without passes() fills the first alone.
        for one, gathered in zip(self._announced, answer[: len(self._announced)], strict=True):
            one.gathered = gathered
            if gathered.ranks_out_of_data == self._ranks:
                self.all_out_of_data = True
                self._passes.remove(one)
            elif gathered.stuck_ranks:
                raise WindowError(
                    f"{gathered.stuck_ranks} of {self._ranks} ranks have no micro-batch at all that has inputs, so "
                    "their idle passes have nothing to run; give passes() a small one to stand in: "
                    "passes(stream, idle=micro_batch)"
                )
        self._announced = ()

    def failure(self, within: float = 0.5) -> RankDesyncError | None:
        """Return what this rank was told in an exchange that goes on while it waits elsewhere; None without such.

        Args:
            within: seconds to wait for it at most.
        """
        work = None if self._pending is None else self._pending.work
        return None if work is None else work.failure(within)

    def next_counts(self) -> Counts:
        """Return what the micro-batch that was handed out last contains.

        Raises:
            WindowError: it had its backward() already.
        """
        # Look-ahead knows further passes, which belong to micro-batches that nobody has yet.
        if self.awaits_backward is None:
            raise WindowError(
                "backward() inside passes(), but the micro-batch it handed out had its backward() already"
            )
        return self.first.counts

    def next_totals(self) -> PassTotals:
        """Return what the pass that was handed out last contains over all ranks, without taking it.

        Raises:
            WindowError: no pass is handed out.
        """
        self.learn()
        if not self._passes:
            raise WindowError(
                "is_gradient_accumulation_boundary() between two micro-batches of passes(): the next one's counts are "
                "not known yet; ask between backward() and step()"
            )
        return self._gathered(self.first).totals

    def known(self) -> list[PassTotals]:
        """Return what the passes contain over all ranks that were announced and not taken."""
        self.learn()
        return [self._gathered(one).totals for one in self._passes]

    def take(self, ahead: int) -> tuple[PassTotals, list[PassTotals]]:
        """Take the next pass.

        Args:
            ahead: of how many passes after it the totals are wanted, at most (>= 0).

        Returns:
            what it contains over all ranks, and what the passes after it do, as far as they are known.
        """
        self.learn()
        taken, self.awaits_backward = self._gathered(self._passes.popleft()), None
        later = [one.gathered.totals for one in islice(self._passes, ahead) if one.gathered is not None]
        return taken.totals, later

    @staticmethod
    def _gathered(one: UpcomingPass) -> GatheredPass:
        assert one.gathered is not None, "a pass is taken after its exchange"
        return one.gathered
