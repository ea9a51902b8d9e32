"""A plan: which rollouts run in which pass on which rank, window by window, and the counts that follow from it."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple
from uuid import uuid4

import numpy as np

from ds_parity.errors import ConfigError
from ds_parity.planning.costs import Cost, check_is_cost
from ds_parity.planning.rollout import Unit

Layout = Literal["packed", "padded"]
_KNOWN: Final = 65_536
_CARRIED: Final = 64
_LOOKED_AT: Final = 32  # tokens of the end, and of the whole, by which a sequence is known beside its length


class Numbers:
    """The latest numbers, of plans or of streams of them.

    Args:
        most: how many are kept (>= 1).
        of: how often each was added before, the latest last.
    """

    def __init__(self, most: int, of: Mapping[int, int] = MappingProxyType({})) -> None:
        self._most = most
        self._plans = dict(of)

    def copy(self) -> Numbers:
        """Return one that goes on from here by itself."""
        return Numbers(self._most, self._plans)

    def add(self, plan: int) -> None:
        """Take note of one more, which is the latest."""
        self._plans[plan] = self._plans.pop(plan, 0) + 1
        if len(self._plans) > self._most:
            # Another thread may do the same; a lock could be held where a process is forked.
            with suppress(RuntimeError):
                self._plans.pop(next(iter(self._plans)), None)

    def latest(self, most: int) -> tuple[int, ...]:
        """Return the latest ones, the last one first."""
        return tuple(islice(reversed(self._plans), most))

    def times(self, plan: int) -> int:
        """Return how often it was added."""
        return self._plans.get(plan, 0)

    def __contains__(self, plan: int) -> bool:
        """Whether it is one of them."""
        return plan in self._plans


class Begun(NamedTuple):
    """A stream of micro-batches that was begun.

    Attributes:
        plan: the number of its plan.
        ranks: for how many data-parallel ranks that is (>= 1).
        stream: tells it from all others.
        empty: it yields nothing.
    """

    plan: int
    ranks: int
    stream: int
    empty: bool = False


class Gone(NamedTuple):
    """What engines have read to its end.

    Attributes:
        plans: numbers of plans, and how many streams of each.
        streams: tell these streams from all others.
    """

    plans: Numbers
    streams: Numbers


class Streams:
    """Of which plans this process has begun a stream of micro-batches.

    Attributes:
        begun: numbers of these plans, the last 65,536, and how often it has begun one of each.
        streams: tell these streams from all others, the last 65,536 of them.
        latest: the last 64 of the plans.
    """

    def __init__(self) -> None:
        self.begun = Numbers(_KNOWN)
        self.streams = Numbers(_KNOWN)
        self.latest: tuple[int, ...] = ()
        self._ended, self._read, self._open = Numbers(_KNOWN), Numbers(_KNOWN), set[int]()
        self._counted = Numbers(_KNOWN)  # of the streams that have ended: two engines may read one
        self._heard = threading.local()

    def begin(self, plan: int, ranks: int, *, empty: bool) -> int:
        """Take note of one more, and return what tells it from all others, of other processes, too.

        Args:
            plan: the number of its plan.
            ranks: for how many data-parallel ranks that is (>= 1).
            empty: it yields nothing.
        """
        # Not by torch's or Python's random numbers, which are the loop's.
        stream = uuid4().int
        self.begun.add(plan)
        self.streams.add(stream)
        self.latest = self.begun.latest(_CARRIED)
        listeners = getattr(self._heard, "by", ())
        if listeners:
            listeners[-1].append(Begun(plan, ranks, stream, empty))
        return stream

    def reads(self, plan: int, stream: int) -> None:
        """Take note that an engine reads a stream, which may have ended: a thread reads ahead."""
        self._open.add(stream)
        if stream in self._ended:  # asked behind it: a thread may end it meanwhile
            self.end(plan, stream)

    def end(self, plan: int, stream: int) -> None:
        """Take note that a stream has ended, or that nobody holds it."""
        self._ended.add(stream)
        if stream in self._open:
            self._open.discard(stream)
            self._count(plan, stream)

    def _count(self, plan: int, stream: int) -> None:
        if stream not in self._counted:
            self._counted.add(stream)
            self._read.add(plan)

    def read_to_the_end(self) -> Gone:
        """Return what engines have read, nothing while one of the streams may go on in another engine."""
        return Gone(Numbers(1), Numbers(1)) if self._open else Gone(self._read.copy(), self._counted.copy())

    @contextmanager
    def heard(self) -> Iterator[list[Begun]]:
        """Return a context, and what `begin` is given inside by this thread, and in no context within."""
        found: list[Begun] = []
        listeners = self._heard.__dict__.setdefault("by", [])
        listeners.append(found)
        try:
            yield found
        finally:
            listeners.pop()


STREAMS: Final = Streams()
"""Those of `micro_batches`."""


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The plan of one window, that is of one optimizer step.

    Attributes:
        rollouts: (n,) indices into the plan's rollouts, pass by pass, in each rank by rank.
        ends: (passes, ranks) where a micro-batch ends in `rollouts`; it starts where the one before it ends.
        sizes: (passes, ranks) tokens that a micro-batch computes on, padding included; 0 for an idle pass.
    """

    rollouts: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray

    @property
    def passes(self) -> int:
        """The number of passes (>= 1)."""
        return len(self.ends)

    @cached_property
    def idle_passes(self) -> int:
        """The number of micro-batches without a rollout, over all ranks."""
        return int((self.sizes == 0).sum())

    @cached_property
    def waited_tokens(self) -> int:
        """The tokens that ranks could have computed while they waited for the longest micro-batch of each pass."""
        return int((self.sizes.max(axis=1, keepdims=True) - self.sizes).sum())

    def micro_batch(self, index: int, rank: int) -> np.ndarray:
        """Return the rollouts of one rank in one pass, as indices into the plan's rollouts; none in an idle pass.

        Args:
            index: the number of the pass, from 0.
            rank: the data-parallel rank, from 0.

        Raises:
            IndexError: there is no such pass or rank.
        """
        if not (0 <= index < self.passes and 0 <= rank < self.ends.shape[1]):
            raise IndexError(
                f"pass {index}, rank {rank}: the window has {self.passes} passes on {self.ends.shape[1]} ranks"
            )
        at = index * self.ends.shape[1] + rank
        return self.rollouts[self.ends.flat[at - 1] if at else 0 : self.ends.flat[at]]


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of all windows.

    Attributes:
        windows: the windows, in the order of arrival.
        left: indices of the rollouts at the end that fill no window.
        rollouts: (n,) what was planned, in the order of arrival; pairs and turns are one of these each.
        lengths: (n,) tokens of every rollout; padded, its rows times their longest.
        squares: (n,) the sum of the squared lengths of the rows of each.
        dp_world_size: data-parallel ranks.
        max_tokens: the most tokens in a micro-batch; an oversize rollout of its own has more.
        layout: how micro-batches are to be collated.
        cost: what it was planned by; None for tokens.
    """

    windows: tuple[WindowPlan, ...]
    left: np.ndarray
    rollouts: Sequence[Unit]
    lengths: np.ndarray
    squares: np.ndarray
    dp_world_size: int
    max_tokens: int
    layout: Layout
    cost: Cost | None = None

    @property
    def passes(self) -> int:
        """The number of passes of all windows together."""
        return sum(window.passes for window in self.windows)

    @property
    def idle_passes(self) -> int:
        """The number of idle passes of all ranks and windows."""
        return sum(window.idle_passes for window in self.windows)

    def number(self, first_window: int = 0) -> int:
        """Return a number that tells plans apart: ranks that planned the same have the same one.

        Plans differ in it where they have other windows, or in some place a rollout of another length, prompt length,
        or some other of the tokens that are looked at: the last 32, and 32 from the whole (but for a chance of 2^-32).

        Args:
            first_window: the window that it is begun with (>= 0).

        Returns:
            1 to 2**32.
        """
        return 1 + zlib.crc32(first_window.to_bytes(8, "little"), self._checksum)

    @cached_property
    def _checksum(self) -> int:
        shapes = [part for one in self.windows for part in (one.rollouts, one.ends, one.sizes)]
        rows = [(row.prompt_length, _some(row.tokens)) for unit in self.rollouts for row in unit.sequences]
        checksum = zlib.crc32(repr((self.dp_world_size, self.layout)).encode())
        for part in (*shapes, self.lengths, np.array(rows, np.int64)):
            checksum = zlib.crc32(np.ascontiguousarray(part).astype(np.int64).tobytes(), checksum)
        return checksum

    def fewest_passes(self) -> int:
        """Return a lower bound: no packing of the same windows has fewer passes."""
        return sum(fewest_passes(self.lengths[w.rollouts], self.dp_world_size, self.max_tokens) for w in self.windows)

    def costs(self, cost: Cost | None = None) -> tuple[np.ndarray, ...]:
        """Return (passes, ranks) for each window: what its micro-batches cost, 0 in idle passes, without `per_pass`.

        Args:
            cost: of a token, and of a square; None for what the plan was made by.

        Raises:
            ConfigError: no cost is given, and the plan was made by tokens; or it is no `Cost`.
        """
        cost = self._cost(cost)
        return tuple(cost.of(window.sizes, self._squares_in(window)) for window in self.windows)

    def waiting(self, cost: Cost | None = None, *, at_step: bool = False) -> float:
        """Return the share of the time in which ranks wait for each other (0 to 1), were costs all that takes time.

        It is 1 - sum of costs / (ranks x time). The time of a window is the sum over its passes of the costliest
        micro-batch, where ranks wait in each pass: on ZeRO 2 and 3, and wherever counts are exchanged pass by pass. It
        is the cost of the busiest rank, where they wait in the step alone: on ZeRO 0 and 1 with look-ahead.

        Args:
            cost: as in `costs`.
            at_step: whether ranks wait in the step alone.

        Raises:
            ConfigError: as in `costs`.
        """
        costs = self.costs(cost)
        time = sum(float(one.sum(axis=0).max() if at_step else one.max(axis=1).sum()) for one in costs)
        return 1 - sum(float(one.sum()) for one in costs) / (self.dp_world_size * time) if costs else 0.0

    def _cost(self, given: Cost | None) -> Cost:
        cost = self.cost if given is None else given
        check_is_cost(given)
        if cost is None:
            raise ConfigError(
                "this plan was made by tokens, without a cost: give one here, as "
                "ds_parity.Cost.of_model(layers=..., ...), or plan(..., cost=...)"
            )
        return cost

    def _squares_in(self, window: WindowPlan) -> np.ndarray:
        values = self.squares[window.rollouts]
        if self.layout == "packed":
            return _summed(values[:, None], window.ends)[..., 0]
        counts = np.diff(window.ends.ravel(), prepend=0)
        squares = np.zeros(len(counts), dtype=np.int64)
        np.maximum.at(squares, np.repeat(np.arange(len(counts)), counts), values)
        return (squares * counts).reshape(window.ends.shape)

    @cached_property
    def counts(self) -> tuple[np.ndarray, ...]:
        """The counts of each window, (passes, ranks, 3): finished rollouts, finished prompts, and loss tokens.

        A rollout of several turns, or a prompt, is finished where its last sequence is run, in the order of passes and
        then of ranks. So the last pass of a window finishes something, and the window closes in it.
        """
        run = np.concatenate([*[window.rollouts for window in self.windows], self.left]).tolist()
        units = self.rollouts
        values = np.zeros((len(units), 3), dtype=np.int64)
        values[list({rollout_key(units[i], i): i for i in run}.values()), 0] = 1
        values[list({units[i].prompt_id: i for i in run}.values()), 1] = 1
        values[:, 2] = [unit.loss_tokens for unit in units]
        return tuple(_summed(values[window.rollouts], window.ends) for window in self.windows)

    def of_rank(self, rank: int, first_window: int = 0) -> Iterator[np.ndarray]:
        """Yield the micro-batches of one rank, pass by pass, as indices into the plan's rollouts.

        Args:
            rank: the data-parallel rank, from 0.
            first_window: the window to begin with, from 0.
        """
        for window in self.windows[first_window:]:
            for index in range(window.passes):
                yield window.micro_batch(index, rank)


def fewest_passes(lengths: np.ndarray, ranks: int, max_tokens: int) -> int:
    """Return a lower bound: no packing of these rollouts into micro-batches has fewer passes.

    There are at least sum / max_tokens micro-batches, rounded up, and at least as many as there are rollouts of more
    than half a micro-batch, of which no two share one (Martello and Toth 1990, "Knapsack Problems", 8.3.1).

    Args:
        lengths: (n,) tokens of each rollout.
        ranks: data-parallel ranks (>= 1).
        max_tokens: the most tokens in a micro-batch (>= 1).
    """
    capped = np.minimum(lengths, max_tokens)
    bins = max(-(-int(capped.sum()) // max_tokens), int((2 * capped > max_tokens).sum()))
    return -(-bins // ranks)


def rollout_key(rollout: Unit, index: int) -> Hashable:
    """Return what the turns of one rollout have in common. Names need to differ within one prompt only."""
    return index if rollout.rollout_id is None else (rollout.prompt_id, rollout.rollout_id)


def _summed(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return (passes, ranks, k): the sums over each micro-batch of values (n, k) in the order in which they are run."""
    until = np.concatenate((np.zeros((1, values.shape[1]), dtype=np.int64), values.cumsum(axis=0)))[ends.ravel()]
    summed: np.ndarray = np.diff(until, axis=0, prepend=0).reshape(*ends.shape, -1)
    return summed


def _some(tokens: Any) -> int:
    # A plan of a hundred million tokens is to be known without reading all of them.
    try:
        parts = tokens[-_LOOKED_AT:], tokens[:: max(1, len(tokens) // _LOOKED_AT)]
    except TypeError:  # a sequence that knows no slices
        return _some(list(tokens))
    values = [part.tolist() if hasattr(part, "tolist") else [int(token) for token in part] for part in parts]
    return zlib.crc32(repr(values).encode())
