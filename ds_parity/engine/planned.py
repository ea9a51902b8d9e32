"""Micro-batches of a plan: each is read by the rank for which it was made, and all ranks begin the same plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from ds_parity.engine.ranks.exchange import WRONG_PLAN
from ds_parity.errors import ConfigError, RankDesyncError
from ds_parity.planning.plans import STREAMS, Begun, Gone, Numbers

_KEPT: Final = 256
_KNOWN: Final = 4096  # far above those that are kept: a rank may be behind others


def refuse_plan_of_others(batch: Any, ranks: int, own: Callable[[], int], what: str) -> None:
    """Raise where a micro-batch was planned for another number of ranks, or for another rank.

    Args:
        batch: the micro-batch.
        ranks: data-parallel ranks that train (>= 1).
        own: returns the data-parallel rank that reads it (>= 0).
        what: which micro-batch of what it is, for the message.

    Raises:
        ConfigError: with the way out.
    """
    planned_for, planned_rank = getattr(batch, "planned_for", None), getattr(batch, "plan_rank", None)
    if planned_for not in (None, ranks):
        raise ConfigError(
            f"{what} is of a plan for {planned_for} data-parallel ranks, and {ranks} train: some of the plan's "
            "micro-batches would run nowhere, or on no rank of their own; plan with dp_world_size=engine.dp_world_size"
        )
    if planned_rank is not None and planned_rank != (rank := own()):
        raise ConfigError(
            f"{what} is that of data-parallel rank {planned_rank} in its plan, and data-parallel rank {rank} reads it: "
            "where two ranks read one part, its rollouts are trained on twice, and others never; give micro_batches() "
            "the rank as it is among the data-parallel ones: dist.get_rank(engine.data_parallel_group), or in a "
            "pipeline engine.grid.get_data_parallel_id()"
        )


@dataclass(frozen=True, slots=True)
class Read:
    """What a stream has given.

    Attributes:
        batch: a micro-batch.
        begun: the streams of plans that it has begun to make it.
    """

    batch: Any
    begun: Sequence[Begun] = ()


class Heard(Iterator[Read]):
    """A stream of micro-batches, and the plans that it goes through: those, too, of which it gives none.

    Args:
        stream: the loop's own.

    Attributes:
        at_end: the streams of plans that it has begun behind its last micro-batch.
    """

    def __init__(self, stream: Iterator[Any]) -> None:
        self._stream = stream
        self.at_end: Sequence[Begun] = ()

    def __next__(self) -> Read:
        with STREAMS.heard() as begun:
            try:
                return Read(next(self._stream), begun)
            except StopIteration:
                self.at_end = begun
                raise


class PlansRead:
    """The plans that a rank takes its micro-batches from.

    Args:
        earlier: the streams that engines had read to their ends before this one was built; None: until now.

    Attributes:
        earlier: likewise. Nothing was left of them for this engine, unless the loop keeps micro-batches.
        begun: numbers of the plans of which the other ranks have heard, the last 256, as they began.
        untold: those of which they have not.
    """

    def __init__(self, earlier: Gone | None = None) -> None:
        self.earlier = STREAMS.read_to_the_end() if earlier is None else earlier
        self.begun: deque[int] = deque(maxlen=_KEPT)
        self.untold: list[int] = []
        self._streams = Numbers(_KNOWN)
        # How often a plan was begun, how often of that in this process, and how often a micro-batch of it was read.
        self._times, self._here, self._ran = Numbers(_KNOWN), Numbers(_KNOWN), Numbers(_KNOWN)
        # Of streams that no micro-batch was read of: their plans.
        self._silent: dict[int, int] = {}
        # Of micro-batches that were made in another process, nobody has heard which plans lie between.
        self._passed = Numbers(_KNOWN)

    def is_new(self, one: Read, ranks: int) -> bool:
        """Whether what a stream has given is of a plan that it had not begun before."""
        return any(it.stream not in self._streams for it in _streams_of(one, ranks))

    def read(self, one: Read, ranks: int) -> None:
        """Note the plans of what a stream has given.

        Args:
            one: what it has given.
            ranks: data-parallel ranks that train (>= 1). Of a plan for others is no micro-batch that they train.
        """
        for it in _streams_of(one, ranks):
            if it.stream not in self._streams:
                self._begin(it)
        stream = _stream_of(one.batch)
        plan = self._silent.pop(stream, None)
        if plan is not None:
            self._ran.add(plan)
        if stream is not None and stream not in STREAMS.streams:
            for passed in getattr(one.batch, "plans_begun", None) or ():
                if passed not in self._passed:
                    self._passed.add(passed)

    def _begin(self, it: Begun) -> None:
        self._streams.add(it.stream)
        self._times.add(it.plan)
        # The loop keeps what an earlier engine has read, to replay it: any rank may leave out any of it.
        if it.stream in self.earlier.streams:
            return
        self.untold.append(it.plan)
        if it.stream in STREAMS.streams:
            self._here.add(it.plan)
            STREAMS.reads(it.plan, it.stream)
        if it.empty:
            self._ran.add(it.plan)
            return
        self._silent[it.stream] = it.plan
        if len(self._silent) > _KNOWN:
            del self._silent[next(iter(self._silent))]

    def tell(self) -> tuple[int, ...]:
        """Return those of which the others have not heard, and take it that they will."""
        told, self.untold = tuple(self.untold), []
        self.begun += told
        return told

    def told(self) -> dict[int, int]:
        """Return how often this rank has run each of the plans that it has told of last.

        A stream that was begun to look at it, and of which no micro-batch was read, was not run.
        """
        return {plan: self._ran.times(plan) for plan in self.begun if plan in self._ran}

    def lacks(self, told: Mapping[int, int]) -> dict[int, int]:
        """Return the plans that this rank has begun less often than others have run them, and how often it has.

        Args:
            told: how often a rank has run each plan, at the most.
        """
        return {plan: self._times.times(plan) for plan, times in told.items() if not self._may_have(plan, times)}

    def _may_have(self, plan: int, times: int) -> bool:
        # Of a stream that was begun before, or by another engine of now, all may have been left out.
        elsewhere = STREAMS.begun.times(plan) - self._here.times(plan) - self.earlier.plans.times(plan)
        left_out = plan in self._passed or elsewhere > 0
        return left_out or self._times.times(plan) >= times

    def copy(self) -> PlansRead:
        """Return one that goes on from here by itself."""
        other = PlansRead(self.earlier)
        other.begun, other.untold, other._silent = self.begun.copy(), list(self.untold), dict(self._silent)
        other._streams, other._passed = self._streams.copy(), self._passed.copy()
        other._times, other._here, other._ran = self._times.copy(), self._here.copy(), self._ran.copy()
        return other


def _stream_of(batch: Any) -> Any:
    stream = getattr(batch, "plan_stream", None)
    return getattr(batch, "plan_number", None) if stream is None else stream


def _streams_of(one: Read, ranks: int) -> list[Begun]:
    heard = [it for it in one.begun if it.ranks == ranks]
    number, stream = getattr(one.batch, "plan_number", None), _stream_of(one.batch)
    if number and all(it.stream != stream for it in heard):
        heard.append(Begun(number, ranks, stream))
    return heard


def refuse_different_plans(gather: Callable[[Any], Sequence[Any]], read: PlansRead) -> None:
    """Raise where ranks have begun different plans; all ranks come, once they know that they may have.

    Ranks may leave out micro-batches of a plan, or all of them, and so begin the next one earlier than others. But each
    begins the streams of the same plans: of two ranks the one that is behind has begun no plan more often than the
    other. Where each has run one more often than the other has begun it, they do not plan the same.

    Args:
        gather: returns what all ranks give it.
        read: the plans of this rank.

    Raises:
        RankDesyncError: on every rank.
    """
    of_ranks: Sequence[dict[int, int]] = gather(read.told())
    most: dict[int, int] = {}
    for told in of_ranks:
        for plan, times in told.items():
            most[plan] = max(times, most.get(plan, 0))
    lacks: Sequence[dict[int, int]] = gather(read.lacks(most))
    # Of ranks that are as far as each other, one stands for all.
    lacking: dict[tuple[Any, ...], int] = {}
    for rank, missing in enumerate(lacks):
        if missing:
            lacking.setdefault((*sorted(of_ranks[rank].items()), 0, *sorted(missing.items())), rank)
    for rank, other in combinations(lacking.values(), 2):
        own, others = _more(of_ranks[rank], lacks[other]), _more(of_ranks[other], lacks[rank])
        if own is not None and others is not None:
            raise RankDesyncError(
                f"ranks take their micro-batches from different plans (rank {rank} begins plan {own:08x} where rank "
                f"{other} begins plan {others:08x}): {WRONG_PLAN}"
            )


def _more(told: Mapping[int, int], lacks: Mapping[int, int]) -> int | None:
    """Return the first plan that a rank has run more often than another one has begun it, None where there is none."""
    return next((plan for plan, times in told.items() if plan in lacks and times > lacks[plan]), None)
