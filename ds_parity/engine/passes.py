"""Passes in lock-step over ranks that run out of data at different times, with counts known ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from ds_parity.config import MAX_LOOKAHEAD
from ds_parity.engine.arguments import (
    chunk_of,
    counts_in,
    holds_nothing,
    iterator_of,
    prefetched,
    refuse_mean_of_parts,
    refuse_what_runs_nothing,
)
from ds_parity.engine.driver import Driver
from ds_parity.engine.planned import Heard, Read, refuse_plan_of_others
from ds_parity.engine.prefetching import Prefetched
from ds_parity.engine.ranks.exchange import Pending
from ds_parity.engine.ranks.upcoming import UpcomingPass
from ds_parity.engine.ranks.wire import RUNS, RUNS_WHOLE, Announcement
from ds_parity.engine.stand_ins import says_so, stand_in, whole
from ds_parity.errors import WindowError
from ds_parity.window import Counts

_END: Any = object()
# What is handed out where a pass has no micro-batch of its own: a stand-in, made where the pass is run.
_NOTHING: Any = object()


class PassQueue:
    """The next passes of this rank: read from its stream, announced together, handed out one by one.

    Args:
        driver: runs the passes, and exchanges their counts.
        stream: micro-batches of this rank, with `rollouts`, `prompts` and `tokens`.
        lookahead: passes exchanged together; 0 as 1; `window` for as many as the window has.
        idle: what idle passes run until a micro-batch was seen.
        skip_idle: hand out no idle pass that needs none (`Driver.may_skip`).
        prefetch: micro-batches that a thread reads ahead of that; 0 for none.

    Attributes:
        upcoming: the passes that were announced and not run.

    Raises:
        WindowError: the stream can't be iterated, a number is out of range, or `idle` has no counts.
        RankDesyncError: ranks were given different look-aheads.
    """

    def __init__(
        self,
        driver: Driver,
        stream: Iterable[Any],
        lookahead: int | str,
        idle: Any = None,
        *,
        skip_idle: bool = False,
        prefetch: int = 0,
    ) -> None:
        try:
            whole_windows = lookahead == "window"
            ahead = _usual_passes(driver) if whole_windows else lookahead
            chunk, self._heard, made_ahead = chunk_of(ahead), Heard(iterator_of(stream)), prefetched(prefetch)
            if idle is not None:
                refuse_what_runs_nothing(idle)
        except Exception as error:  # the other ranks wait for what this one announces
            driver.refuse(error)
            raise
        driver.look_ahead(chunk)
        self._made = Prefetched(self._heard, made_ahead) if made_ahead else None
        self._stream: Iterator[Read] = self._made or self._heard
        self._skip_idle = skip_idle
        self._driver = driver
        self._chunk = chunk
        # The one micro-batch that is kept when it has been run. Its inputs are its own, the loop may take others apart.
        self._smallest = None if idle is None else whole(idle)
        # Ranks of which one knows the whole window, and another as many passes, would divide by other totals.
        self.upcoming = driver.upcoming(RUNS_WHOLE if whole_windows else RUNS)
        self.upcoming.whole_windows = whole_windows
        self._out_of_data = False
        # A rank without any micro-batch is heard of in the first exchange. ZeRO 3's forward would wait for it until the
        # time limit, and could not say why.
        self._hears_first = driver.engine.zero_optimization_stage() == 3
        # What a thread has made by the end of a window is known before it is taken.
        if chunk > 1 and made_ahead >= chunk:
            self.upcoming.early = self
        self._known: tuple[Any, int] | None = None
        self._rank = partial(dist.get_rank, driver.data_group)

    def __iter__(self) -> Iterator[Any]:
        while not self._driver.stops_here():
            self._refuse_another_generator()
            self._fill()
            if not self.upcoming:
                return
            if self._skipped():
                continue
            # Nothing here keeps the micro-batch while the loop runs it: its memory is the loop's to free.
            handed = self.upcoming.first
            yield self._handed_out(handed)
            if self.upcoming and self.upcoming.first is handed:
                error = WindowError(
                    "passes() was asked for the next micro-batch before the last had its backward(): all ranks count "
                    "on every pass; what is to be left out must be left out of the stream"
                )
                # Often one rank alone leaves a micro-batch out (its loss is NaN), and others wait for its backward.
                self._driver.refuse_soon(error)
                raise error

    def close(self) -> None:
        """End the thread that reads ahead, if there is one."""
        if self._made is not None:
            self._made.close()

    def _handed_out(self, one: UpcomingPass) -> Any:
        batch = self.upcoming.hand_out()
        # A pass behind the end of the data is given its stand-in where it is run: most of a long look-ahead never are.
        return stand_in(self._smallest) if one.announcement.out_of_data or batch is _NOTHING else batch

    def _refuse_another_generator(self) -> None:
        if self._driver.queue is not self.upcoming:
            raise WindowError(
                "passes() goes on although a newer passes() of this engine was begun: both would announce passes, and "
                "ranks would fall out of sync; end one before the next, or use one stream"
            )

    def _skipped(self) -> bool:
        # Between boundaries DeepSpeed may be silent; an idle pass is nothing but its counts then.
        if not self._skip_idle or self.upcoming.first.counts != Counts():
            return False
        if not self._driver.may_skip(self.upcoming.next_totals()):
            return False
        self._driver.run_pass(None, self.upcoming.first.counts)
        return True

    def _fill(self) -> None:
        # A window starts with at least a chunk known; chunks follow each other, each pass exchanged once. A chunk may
        # have been announced in the step before.
        self.upcoming.learn()
        if self.upcoming.whole_windows:
            self._fill_window()
            return
        wanted = self._chunk if self._driver.ledger.window.passes == 0 else 1
        while len(self.upcoming) < wanted and not self.upcoming.all_out_of_data:
            pending = self._announce()
            if self._chunk > 1 or self._out_of_data or self._smallest is None or self._hears_first:
                self._hears_first = False
                self.upcoming.learn()
            else:
                # This rank goes into its forward; one whose stream has ended waits to hear whether there is a pass at
                # all, and ZeRO 3's forward waits for that one.
                pending.proceed()

    def _fill_window(self) -> None:
        ledger = self._driver.ledger
        # Only in front of a window: all that it will hold is known from there on.
        if ledger.window.passes and len(self.upcoming):
            return
        while not (self.upcoming.all_out_of_data or ledger.reaches_boundary(self.upcoming.known())):
            self._announce()
            self.upcoming.learn()

    def _announce(self) -> Pending:
        chunk = self._next_chunk()
        return self.upcoming.announce(chunk, self._driver.plans.tell())

    def _next_chunk(self) -> list[UpcomingPass]:
        self._known = None  # what was not taken is read again
        try:
            read = self._read()
        except Exception as error:
            self._driver.refuse(error)
            raise
        return self._padded(read)

    def _padded(self, read: list[UpcomingPass]) -> list[UpcomingPass]:
        padding = self._chunk - len(read)
        # Every rank must hear that one has nothing to run, or the others would wait for it in the backward. Where
        # something was read all the same, all of it holds nothing and has no inputs.
        stuck = self._smallest is None
        if stuck:
            read = [UpcomingPass(Announcement(stuck=True), _NOTHING) for _ in read]
        idle = Announcement(out_of_data=True, stuck=stuck)
        return [*read, *(UpcomingPass(idle) for _ in range(padding))]

    def _read(self) -> list[UpcomingPass]:
        read: list[UpcomingPass] = []
        while len(read) < self._chunk and not self._out_of_data:
            one = next(self._stream, _END)
            if one is _END:
                self._out_of_data = True
                self._driver.plans.read(Read(None, self._heard.at_end), self._driver.ranks)
                break
            read.append(self._noted(one))
        return read

    def _noted(self, one: Read) -> UpcomingPass:
        batch = one.batch
        refuse_plan_of_others(batch, self._driver.ranks, self._rank, "a micro-batch that passes() has read")
        self._driver.plans.read(one, self._driver.ranks)
        counts = counts_in(batch, self._driver.ledger.weighting)
        if holds_nothing(batch, counts):
            return UpcomingPass(Announcement(), _NOTHING)
        # The smallest micro-batch makes the cheapest idle pass.
        if self._smallest is None or batch.tokens < self._smallest.tokens:
            self._smallest = whole(batch)
        self._refuse_mean_of_parts(batch, counts)
        # One of the stream that holds nothing says so as a stand-in does, whatever its class is.
        runs = stand_in(batch) if counts == Counts() and not says_so(batch) else batch
        return UpcomingPass(Announcement(counts), runs)

    # What a thread has made, before it is taken.

    def known(self) -> list[UpcomingPass] | None:
        """Return what would be announced next, and take nothing; None where it is not known yet, or is refused."""
        if self._made is None or self._smallest is None:
            return None
        made = [] if self._out_of_data else self._made.waiting(self._chunk)
        if made is None:
            return None
        at_end = [Read(None, self._heard.at_end)] if len(made) < self._chunk else []
        # Of a plan the others hear where it is announced.
        if any(self._driver.plans.is_new(one, self._driver.ranks) for one in (*made, *at_end)):
            return None
        before = self._smallest
        try:
            noted = [self._noted(one) for one in made]
        except Exception:  # raised where it is taken: this rank is inside a step
            return None
        finally:
            # What is not taken yet may be noted again.
            after, self._smallest = self._smallest, before
        self._known = after, len(made)
        return self._padded(noted)

    def take(self) -> None:
        """Take what `known` has returned last."""
        assert self._known is not None
        (self._smallest, taken), self._known = self._known, None
        for _ in range(taken):
            next(self._stream)
        # Where a stream has fewer, its end has been made, too.
        if taken < self._chunk and not self._out_of_data:
            self._out_of_data = next(self._stream, _END) is _END

    def _refuse_mean_of_parts(self, batch: Any, counts: Counts) -> None:
        weighting, weight = self._driver.ledger.weighting, getattr(batch, "weight", None)
        own = weight if isinstance(weight, Mapping) else {}
        given = {name for name in weighting.terms.names if own.get(name) != 0} if weighting.terms else None
        refuse_mean_of_parts(weighting, counts, len(getattr(batch, "held", ())), given)


def _usual_passes(driver: Driver) -> int:
    """Return how many passes of usual micro-batches a whole window has: so many are exchanged together.

    Raises:
        WindowError: the caller ends windows, so that nobody knows where they end.
    """
    if driver.settings.by_caller:
        raise WindowError(
            "passes(lookahead='window') with ds_parity.boundary 'caller': step() ends a window, wherever that is, so "
            "nobody knows what it will contain; call engine.expect(...) before each window"
        )
    return min(driver.engine.gradient_accumulation_steps(), MAX_LOOKAHEAD)
