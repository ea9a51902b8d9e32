"""A pass that waits for its counts behind its backward: on ZeRO 0 and 1, without look-ahead, inside a window."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ds_parity.engine.among_ranks import AmongRanks
from ds_parity.engine.boundary import Boundary
from ds_parity.engine.division import Division, Loss
from ds_parity.engine.given_counts import GivenCounts
from ds_parity.engine.pass_state import PARTLY_THERE, PassState
from ds_parity.engine.ranks.upcoming import Upcoming, UpcomingPass
from ds_parity.engine.ranks.wire import Announcement
from ds_parity.errors import RankDesyncError, WindowError
from ds_parity.window import Counts, Window


class LatePass:
    """Runs passes whose counts travel while their backward runs.

    DeepSpeed's backward runs unmarked, because nobody knows yet whether it is the window's last. Where the counts then
    say that it was, the gradients are reduced behind it.

    Args:
        driver: whose passes they are.
        given: where their counts come from.
        state: of the driver's open window.
        division: runs the backward.
        boundary: marks DeepSpeed's boundary, and reduces.
        alone: no other rank shares this rank's micro-batch; those that do talk to each other inside the model.
    """

    def __init__(
        self,
        driver: AmongRanks,
        given: GivenCounts,
        state: PassState,
        division: Division,
        boundary: Boundary,
        *,
        alone: bool,
    ) -> None:
        self._driver = driver
        self._given = given
        self._state = state
        self._division = division
        self._boundary = boundary
        self._alone = alone

    def is_possible(self) -> bool:
        """Whether the counts of the coming pass may be waited for behind its backward.

        DeepSpeed must not talk to other ranks in it, or a rank that is elsewhere would be waited for there; and what
        losses are divided by must be known, so the first pass of a window with a gradient waits in front. What may be
        refused because of the counts is refused before there is a gradient.
        """
        window = self._driver.ledger.window
        known = window.passes > 0 and window.expected > 0
        return known and self._is_silent() and not (self._knows_ahead() or self._may_be_refused())

    def _is_silent(self) -> bool:
        adapter = self._driver.adapter
        among_others = self._driver.over is not None and self._alone
        return among_others and adapter.silent_inside_windows and not adapter.reduces_in_hooks

    def _knows_ahead(self) -> bool:
        queue = self._driver.queue
        return queue is not None and (self._driver.exchange.slots > 1 or queue.whole_windows)

    def _may_be_refused(self) -> bool:
        ledger = self._driver.ledger
        surplus = self._driver.settings.overshoot == "error"
        return bool(surplus or ledger.promised or ledger.weighting.terms) or self._driver.adapter.inside_no_sync

    def run(self, loss: Loss, counts: Counts, **kwargs: Any) -> torch.Tensor:
        """Run the pass; where its counts close the window, reduce behind it.

        Args:
            loss: scalar, or terms by their names.
            counts: what this rank's micro-batch contains.
            **kwargs: for DeepSpeed's `backward`.

        Returns:
            The loss as it was accumulated.

        Raises:
            WindowError: the counts are refused, and the window is lost: the gradient is there.
            RankDesyncError: ranks are out of sync.
        """
        ledger, queue = self._driver.ledger, self._announced(counts)
        self._state.awaits_step, self._state.lost = True, PARTLY_THERE
        self._boundary.mark(False)
        try:
            with self._driver.telling():
                accumulated = self._division.backward(loss, counts, ledger.weighting, ledger.window, **kwargs)
        except Exception:
            # Counted all the same, as on the other ranks: what is loaded over it goes on from the same pass.
            with suppress(RankDesyncError, WindowError):
                self._count(queue)
            raise
        if self._count(queue).closed and ledger.total() > 0:
            self._boundary.reduce()
        self._state.ran_backward()
        return accumulated

    def _announced(self, counts: Counts) -> Upcoming:
        """Return the line of passes in which the coming one is announced."""
        if self._driver.queue is not None:
            return self._driver.queue
        line = self._driver.upcoming()
        # Also between two ranks: gloo ends a send where the other one receives.
        line.announce([UpcomingPass(Announcement(counts, gives=self._given.gives))]).proceed()
        return line

    def _count(self, queue: Upcoming) -> Window:
        return self._driver.ledger.count(queue.take(0)[0])
