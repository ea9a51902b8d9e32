"""Where the counts of the coming pass come from: the micro-batch of `passes()`, or what the loop gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from ds_parity.engine.among_ranks import AmongRanks
from ds_parity.engine.arguments import (
    counts_by_name,
    counts_of,
    refuse_contradiction,
    refuse_forgotten,
    refuse_left_behind,
    refuse_mean_of_parts,
    refuse_missing_terms,
)
from ds_parity.engine.ranks.upcoming import Upcoming
from ds_parity.engine.ranks.wire import Gives
from ds_parity.window import Counts


class GivenCounts:
    """Completes what a loop gives for its micro-batches, and remembers what it gave before.

    Args:
        driver: whose passes they are; its queue is set here.
        usual_rollouts: what a micro-batch contains where the loop gives no count (>= 1).

    Attributes:
        by_loop: a backward outside of `passes()` was given counts, so that no pass to come can be foretold.
    """

    def __init__(self, driver: AmongRanks, usual_rollouts: int) -> None:
        self.by_loop = False
        self._driver = driver
        self._usual_rollouts = usual_rollouts
        self._of_window = 0, 0, 0  # its index, the loop's own micro-batches in it, and those that count as usual
        self._gave: set[str] = set()
        self._left: Counts | None = None  # of a micro-batch whose passes() was left before its backward
        self._open_queues: list[Upcoming] = []  # of all passes() that are not at their end: one may stand in another

    def of_pass(self, rollouts: Any, prompts: Any, tokens: Any, weight: Any, terms: Set[str] | None) -> Counts:
        """Return the counts of the coming pass, as `Driver.counts_given` says."""
        if (queue := self._driver.queue) is not None:
            counts = queue.next_counts()
            given = counts_by_name(rollouts, prompts, tokens, weight)
            refuse_contradiction(counts, given, self._driver.ledger.weighting)
            refuse_missing_terms(self._driver.ledger.weighting, counts, terms)
            return counts
        # Counts that are refused say so, too: nothing can be foretold in such a loop.
        gives = any(number is not None for number in (rollouts, prompts, tokens, weight))
        self.by_loop = self.by_loop or gives
        # The other ranks are in this pass, and would wait for its counts.
        with self._driver.telling():
            return self._of_loop(counts_by_name(rollouts, prompts, tokens, weight), terms)

    def _of_loop(self, given: Mapping[str, Any], terms: Set[str] | None) -> Counts:
        weighting = self._driver.ledger.weighting
        counts = counts_of(self._driver.settings, self._usual_rollouts, given, weighting, terms or frozenset())
        refuse_missing_terms(weighting, counts, terms)
        refuse_mean_of_parts(weighting, counts, given=terms)
        # An idle pass contains nothing, whether its loop counts or not.
        if counts.active:
            refuse_forgotten(self._gave, given, counts)
            waiting = (one.awaits_backward for one in self._open_queues if one.awaits_backward is not None)
            if (left := self._left or next(waiting, None)) is not None:
                refuse_left_behind(left, given, counts)
            self._gave.update(given.keys() - {"weight"})
        if counts.active:
            active, usual = self._in_window
            self._of_window = self._driver.ledger.window.index, active + 1, usual + int(counts.usual)
        self.forget_left()
        return counts

    @property
    def gives(self) -> Gives:
        """How the loop has counted the micro-batches of the open window that were not of `passes()`."""
        return Gives.of(*self._in_window)

    @property
    def _in_window(self) -> tuple[int, int]:
        window, active, usual = self._of_window
        return (active, usual) if window == self._driver.ledger.window.index else (0, 0)

    def forget_left(self) -> None:
        """Ask nothing more about a micro-batch that was left without its backward."""
        self._left = None

    def abandon(self) -> None:
        """Forget what the open window was given, and what was left without its backward."""
        self._of_window = 0, 0, 0
        self.forget_left()

    @contextmanager
    def taking_from(self, queue: Upcoming) -> Iterator[None]:
        """Take the passes inside from `queue`, which has announced them."""
        driver = self._driver
        driver.queue, self._left = queue, None
        self._open_queues.append(queue)
        driver.exchange.early = queue.early is not None
        try:
            yield
        finally:
            self._open_queues.remove(queue)
            # An older generator that is closed late must not end a newer one.
            if driver.queue is queue:
                driver.queue, self._left = None, queue.awaits_backward
                driver.exchange.early = False
