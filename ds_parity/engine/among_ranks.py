"""What a driver says to the other ranks, where it says it is, and how long it waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch

from ds_parity.config import Settings
from ds_parity.engine.arguments import weighting_of
from ds_parity.engine.internals.adapter import choose
from ds_parity.engine.internals.fetched_ahead import explain_fetched
from ds_parity.engine.internals.group_options import Options
from ds_parity.engine.internals.groups import Members, groups_of
from ds_parity.engine.internals.other_modules import explain
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.planned import PlansRead
from ds_parity.engine.prefetching import is_reading
from ds_parity.engine.ranks.agreement import naming_lost_ranks, same
from ds_parity.engine.ranks.exchange import Exchange, Pending
from ds_parity.engine.ranks.hostgroups import group_of
from ds_parity.engine.ranks.hostsum import HostSum, PlacedSum
from ds_parity.engine.ranks.limits import Limit
from ds_parity.engine.ranks.upcoming import Upcoming
from ds_parity.engine.ranks.wire import (
    ANYWHERE,
    FOUND_NONE,
    LOADED,
    LOADS,
    RESUMES,
    RUNS,
    SAVED,
    SAVES,
    Announcement,
    Place,
)
from ds_parity.errors import ConfigError, RankDesyncError, WindowError
from ds_parity.window import Ledger, Rules

_MOST_SECONDS: Final = 5.0


class AmongRanks:
    """A driver as the other ranks know it.

    Args:
        engine: the bare DeepSpeed engine.
        settings: the extra keys.
        members: the ranks that step together.
        slots: passes that one exchange holds (>= 1).
        number: of the engine among those of this process, the same on every rank (>= 1).

    Attributes:
        engine: the bare DeepSpeed engine.
        settings: the extra keys.
        adapter: of the engine's optimizer wrapper.
        ledger: windows, totals and clocks.
        ranks: data-parallel ranks.
        data_group: process group of those that read different micro-batches, in which this one has its number.
        over: sums over them and those that share their micro-batches, on the host; None for one rank.
        exchange: counts over the data-parallel ranks.
        queue: the passes that `passes()` hands out; None outside of it.
        options: what the groups of the optimizer say, which must be the same on all ranks.
        plans: those whose micro-batches `passes()` has read.
    """

    def __init__(self, engine: Engine, settings: Settings, members: Members, slots: int, number: int) -> None:
        self.engine = engine
        self.settings = settings
        self.ranks = members.ranks
        self.data_group = members.data_group
        by_caller = settings.by_caller
        rules = Rules(settings.target, self.ranks, settings.count, settings.overshoot, settings.loss_weight, by_caller)
        weighting = weighting_of(settings, self.ranks)
        self.ledger = Ledger(rules, weighting)
        together, wait = self.ranks * members.peers.size, settings.exchange_timeout
        self.over = HostSum(group_of(members.group), wait) if together > 1 else None
        # Before a checkpoint ranks may have done other things for a while, and no pass waits for them.
        self._patient = None if self.over is None else HostSum(group_of(members.group))
        self.exchange = Exchange(self.over, together, slots, wait, members.peers, weights=weighting.brought)
        self.adapter = choose(engine)
        self.options = Options(engine)
        self.queue: Upcoming | None = None
        self.plans = PlansRead()
        self._limit = Limit(groups_of(engine), wait)
        self._number = number
        self._configuration = settings.fingerprint

    def _place(self, kind: str) -> Place:
        window = self.ledger.window
        return Place(kind, window.index, self.ledger.passes, self._configuration, self._number)

    def over_ranks(self, kind: str, *, used: bool = False) -> PlacedSum | None:
        """Return what sums over the ranks for something that every rank does at the same place; None for one rank.

        Args:
            kind: what they do there, as in `Place`.
            used: a step follows: all must have used the same parameters in the window, too, where DeepSpeed needs that,
                and have the same learning rates.

        Raises:
            WindowError: this is the thread of `passes(prefetch=...)`.
        """
        if self.over is None:
            return None
        if is_reading():
            raise WindowError(
                f"the stream of passes(prefetch=...) {kind} in its thread: while passes run, only the loop's own "
                "thread may talk to other ranks; do it before passes() begins, or read the stream with prefetch=0"
            )

        def place() -> Place:
            here = self._place(kind)
            if not used:
                return here
            steps = self.ledger.total() > 0 and not self.ledger.drops
            rates = self.options.told() if steps else ()
            return replace(here, used=self.adapter.used_parameters(), rates=rates)

        return PlacedSum(self.over, place)

    def upcoming(self, doing: str = RUNS) -> Upcoming:
        """Return an empty line of passes, whose exchanges say where this rank is and what it does."""

        def start(passes: Sequence[Announcement], begun: Sequence[int]) -> Pending:
            return self.exchange.start(self._place(doing), passes, begun)

        return Upcoming(start, self.ranks)

    def look_ahead(self, passes: int) -> None:
        """Exchange so many passes together from here on.

        Raises:
            RankDesyncError: ranks were given different numbers.
        """
        if passes != self.exchange.slots:
            if self.over is not None:
                with naming_lost_ranks("passes(), where all say how far they look ahead"):
                    same(self.over, self._place("begins passes() with another look-ahead"), "look-ahead", passes)
            self.exchange.slots = passes

    def meet(self, place: Place) -> None:
        """Wait until all ranks come for the same: what follows would leave one alone in DeepSpeed, for half an hour.

        Args:
            place: where all must be.

        Raises:
            RankDesyncError: ranks are out of sync.
        """
        if self._patient is not None:
            self._patient.start(torch.zeros(0, dtype=torch.int64, device="cpu"), place).wait()

    def refuse_saving(self, error: Exception) -> None:
        """Tell the other ranks, which come to save a checkpoint, that this one has raised in place of it."""
        self.exchange.refuse(self._place(SAVES), error)

    def say_to_save(self, value: Any) -> list[Any]:
        """Return what all ranks say that come to save a checkpoint.

        Raises:
            RankDesyncError: not every rank saves.
        """
        return self._told_by_all(value, self._place(SAVES))

    def say_saved(self, value: Any) -> list[Any]:
        """Return what all ranks say that have saved a checkpoint.

        Raises:
            RankDesyncError: another rank has raised, or ended.
        """
        return self._told_by_all(value, self._place(SAVED))

    def say_to_load(self, value: Any) -> list[Any]:
        """Return what all ranks say that come to load a checkpoint, wherever they are: it may mend an error.

        Raises:
            RankDesyncError: not every rank loads.
        """
        return self._told_by_all(value, self._anywhere(LOADS))

    @contextmanager
    def telling_of_load(self, doing: str = LOADED, *, at_once: bool = False) -> Iterator[None]:
        """Tell the other ranks what a load raises: a file that is broken or missing may be one rank's alone.

        Args:
            doing: what they come for.
            at_once: raise it here, and tell them once they have loaded. Mostly all raise alike: some seconds are left
                for that, so that the next load finds nothing of this one.
        """
        try:
            yield
        except RankDesyncError:
            raise
        except Exception as error:
            self.exchange.refuse(self._anywhere(doing), error, most=_MOST_SECONDS if at_once else None)
            raise

    def say_loaded(self, value: Any, *, found: bool) -> list[Any]:
        """Return what all ranks say once they have loaded a checkpoint.

        Args:
            value: what this one says.
            found: there was one.

        Raises:
            RankDesyncError: another rank has raised in its load, or has found another thing.
        """
        return self._told_by_all(value, self._anywhere(LOADED if found else FOUND_NONE))

    def say_resumed(self) -> None:
        """Wait until all ranks go on from the checkpoint that they have loaded.

        Raises:
            RankDesyncError: another rank has raised in between.
        """
        self._told_by_all(None, self._anywhere(RESUMES))

    def _told_by_all(self, value: Any, place: Place) -> list[Any]:
        return [value] if self._patient is None else self._patient.gather(value, place)

    def _anywhere(self, kind: str) -> Place:
        return replace(self._place(kind), window=ANYWHERE, pass_index=0)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one has raised in place of announcing its next passes.

        Without look-ahead they are in a forward, where ZeRO 3 waits for this rank: they answer from a thread, and raise
        when the forward's time is up, or when this rank ends.
        """
        self.exchange.refuse(self._place("reads its passes"), error)

    def refuse_soon(self, error: Exception) -> None:
        """Tell the other ranks, as `refuse` does, for some seconds: they may be inside DeepSpeed, and hear nothing."""
        self.exchange.refuse(self._place(RUNS), error, most=_MOST_SECONDS)

    @contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Bound what DeepSpeed waits for inside by `exchange_timeout`, and say what it means where ranks don't come.

        Args:
            where: what this rank does, for the message ("a forward").

        Raises:
            RankDesyncError: another rank ended, is out of sync, or did not come in time.
        """
        limit = f"{where}, up to {self.settings.exchange_timeout:g} s (ds_parity.exchange_timeout)"
        with naming_lost_ranks(limit, self._told), self._limit.applied():
            yield

    def _told(self) -> RankDesyncError | None:
        return None if self.queue is None else self.queue.failure()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks what is raised inside: they wait for the counts of this pass, or in a step's sum."""
        try:
            yield
        except (ConfigError, WindowError) as error:
            self.exchange.refuse(self._place(RUNS), error)
            raise

    def explain_forward(self, error: Exception) -> None:
        """Raise WindowError where it is known why a forward of ZeRO 3 has raised.

        Args:
            error: that the forward has raised.
        """
        # The first rank never raises this: it waits in its forward, and hears of it when this one ends.
        explain(error)
        explain_fetched(error)
        if isinstance(error, AttributeError):
            with self.telling():
                self.adapter.kept.explain_forward(error)
