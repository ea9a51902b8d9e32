"""Rollouts to windows, and windows to micro-batches on ranks: who runs what in which pass, before anything is run.

Windows are cut first, by the order of arrival alone: they, their boundaries and the LR are the same for any number of ranks
and any `max_tokens`. What lies inside a window is packed (`packing.py`): as few passes as are found, then little waiting in
each, then ranks that do alike in all.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ds_parity.errors import ConfigError
from ds_parity.planning.packing import best_fit, exchange, fill, level, level_runs, sorted_runs
from ds_parity.planning.records import Rollout

Count = Literal["rollout", "prompt"]
Layout = Literal["packed", "padded"]
Oversize = Literal["refuse", "own"]

# In larger windows best-fit decreasing comes to the lower bound by itself, and a search takes longer than it saves.
_SEARCHED = 4096

_MOST, _MOST_RANKS = 2**30, 2**20  # beyond these a number is a slip

_CHOICES = {"count": ("rollout", "prompt"), "layout": ("packed", "padded"), "oversize": ("refuse", "own")}


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """One optimizer step.

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
        """Forward and backward runs on every rank."""
        return len(self.ends)

    @cached_property
    def idle_passes(self) -> int:
        """Micro-batches without a rollout, over all ranks."""
        return int((self.sizes == 0).sum())

    @cached_property
    def waited_tokens(self) -> int:
        """What ranks could have computed while they waited for the longest micro-batch of each pass, in tokens."""
        return int((self.sizes.max(axis=1, keepdims=True) - self.sizes).sum())

    def micro_batch(self, index: int, rank: int) -> np.ndarray:
        """Return the rollouts of one rank in one pass, as indices; none in an idle pass.

        Raises:
            IndexError: there is no such pass or rank (they count from 0).
        """
        if not (0 <= index < self.passes and 0 <= rank < self.ends.shape[1]):
            raise IndexError(
                f"pass {index}, rank {rank}: the window has {self.passes} passes on {self.ends.shape[1]} ranks"
            )
        at = index * self.ends.shape[1] + rank
        return self.rollouts[self.ends.flat[at - 1] if at else 0 : self.ends.flat[at]]


@dataclass(frozen=True, eq=False)
class Plan:
    """All windows.

    Attributes:
        windows: in the order of arrival.
        left: indices of the rollouts at the end that fill no window.
        lengths: (n,) tokens of every rollout.
        dp_world_size: data-parallel ranks.
        max_tokens: the most tokens in a micro-batch; an oversize rollout of its own has more.
    """

    windows: tuple[WindowPlan, ...]
    left: np.ndarray
    lengths: np.ndarray
    dp_world_size: int
    max_tokens: int

    @property
    def passes(self) -> int:
        """Passes of all windows."""
        return sum(window.passes for window in self.windows)

    @property
    def idle_passes(self) -> int:
        """Idle passes of all ranks and windows."""
        return sum(window.idle_passes for window in self.windows)

    def fewest_passes(self) -> int:
        """Return a number of passes that no packing of the same windows can be below."""
        return sum(fewest_passes(self.lengths[w.rollouts], self.dp_world_size, self.max_tokens) for w in self.windows)

    def of_rank(self, rank: int) -> Iterator[np.ndarray]:
        """Yield the micro-batches of one rank, pass by pass, as indices."""
        for window in self.windows:
            for index in range(window.passes):
                yield window.micro_batch(index, rank)


def plan(
    rollouts: Iterable[Rollout],
    *,
    dp_world_size: int,
    target: int,
    max_tokens: int,
    count: Count = "rollout",
    layout: Layout = "packed",
    oversize: Oversize = "refuse",
) -> Plan:
    """Plan the optimizer steps of rollouts; the same for the same arguments.

    Args:
        rollouts: in the order of arrival.
        dp_world_size: data-parallel ranks (>= 1).
        target: rollouts, or with `count: prompt` prompts, that close a window (>= 1).
        max_tokens: the most tokens in a micro-batch (>= 1): their sum where it is packed, rows x longest where padded.
        count: `rollout`, or `prompt`: a window holds whole prompts, in the order in which they are complete.
        layout: how micro-batches are collated: `packed` end to end, or `padded` to the longest.
        oversize: a rollout of more than `max_tokens` is refused, or gets a micro-batch of its `own`.

    Raises:
        ConfigError: a number or a choice is none of these, a rollout is empty, or longer than `max_tokens`.
    """
    rollouts = list(rollouts)
    dp_world_size, target, max_tokens = _numbers(dp_world_size=dp_world_size, target=target, max_tokens=max_tokens)
    _check_choices(count=count, layout=layout, oversize=oversize)
    lengths = np.fromiter((len(rollout.tokens) for rollout in rollouts), dtype=np.int64, count=len(rollouts))
    _check_lengths(rollouts, lengths, max_tokens, oversize)
    order, ends = _windows(rollouts, target, count)
    windows = tuple(
        _packed(order[start:end], lengths, dp_world_size, max_tokens, layout) for start, end in pairwise([0, *ends])
    )
    return Plan(windows, order[ends[-1] if ends else 0 :], lengths, dp_world_size, max_tokens)


def fewest_passes(lengths: np.ndarray, ranks: int, max_tokens: int) -> int:
    """Return max(ceil(sum / max_tokens), lengths over half of it) / ranks, rounded up: no packing has fewer passes.

    Two rollouts of more than half a micro-batch never share one (Martello and Toth 1990, "Knapsack Problems", 8.3.1).
    """
    held = np.minimum(lengths, max_tokens)
    bins = max(-(-int(held.sum()) // max_tokens), int((2 * held > max_tokens).sum()))
    return -(-bins // ranks)


def _windows(rollouts: Sequence[Rollout], target: int, count: Count) -> tuple[np.ndarray, list[int]]:
    """Return the rollouts' indices in the order of their windows, and where each full window ends."""
    if count == "rollout":
        return np.arange(len(rollouts)), list(range(target, len(rollouts) + 1, target))
    complete = {rollout.prompt_id: index for index, rollout in enumerate(rollouts)}
    number = {prompt: place for place, prompt in enumerate(sorted(complete, key=complete.__getitem__))}
    places = np.fromiter((number[r.prompt_id] for r in rollouts), dtype=np.int64, count=len(rollouts))
    after = np.cumsum(np.bincount(places, minlength=len(number)))
    return np.argsort(places, kind="stable"), after[target - 1 :: target].tolist()


def _packed(held: np.ndarray, lengths: np.ndarray, ranks: int, max_tokens: int, layout: Layout) -> WindowPlan:
    own = lengths[held]
    capped = np.minimum(own, max_tokens)  # a longer one fills a micro-batch by itself
    bins = _bins(capped, ranks, max_tokens, layout)
    sizes = _sizes(own, bins, layout)
    places = _places(sizes, ranks)
    passes = -(-len(sizes) // ranks)
    grid = np.zeros(passes * ranks, dtype=np.int64)
    grid[places] = sizes
    order = np.argsort(places[bins], kind="stable")
    ends = np.cumsum(np.bincount(places[bins], minlength=passes * ranks))
    return WindowPlan(held[order], ends.reshape(passes, ranks), grid.reshape(passes, ranks))


def _bins(lengths: np.ndarray, ranks: int, max_tokens: int, layout: Layout) -> np.ndarray:
    """Return the bin of each item: so few that they take few passes, as many as these have places for."""
    bins = sorted_runs(lengths, max_tokens) if layout == "padded" else best_fit(lengths, max_tokens)
    passes = -(-(int(bins.max()) + 1) // ranks)
    places = min(passes * ranks, len(lengths))
    if layout == "padded":
        return fill(lengths, level_runs(lengths, max_tokens, places), places)
    best = _levelled(lengths, places, max_tokens)
    least = fewest_passes(lengths, ranks, max_tokens) if len(lengths) <= _SEARCHED else passes
    while best is not None and passes > least:
        passes -= 1
        fewer = _levelled(lengths, passes * ranks, max_tokens)
        if fewer is None:
            break
        best = fewer
    return fill(lengths, bins, places) if best is None else best


def _levelled(lengths: np.ndarray, bins: int, max_tokens: int) -> np.ndarray | None:
    """Return items in bins of like size, None where one would be too full."""
    found = level(lengths, bins)
    if len(lengths) <= _SEARCHED:
        found = exchange(lengths, found, max_tokens)
    return found if np.bincount(found, lengths).max() <= max_tokens else None


def _sizes(lengths: np.ndarray, bins: np.ndarray, layout: Layout) -> np.ndarray:
    if layout == "packed":
        return np.bincount(bins, lengths).astype(np.int64)
    longest = np.zeros(int(bins.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, bins, lengths)
    return longest * np.bincount(bins)


def _places(sizes: np.ndarray, ranks: int) -> np.ndarray:
    """Return pass * ranks + rank for each micro-batch: like beside like, and the largest to who has done least so far."""
    order = np.argsort(-sizes, kind="stable")
    done = np.zeros(ranks, dtype=np.int64)
    places = np.empty(len(sizes), dtype=np.int64)
    for first in range(0, len(sizes), ranks):
        row = order[first : first + ranks]
        chosen = np.argsort(done, kind="stable")[: len(row)]
        places[row] = first + chosen
        done[chosen] += sizes[row]
    return places


def _numbers(**values: Any) -> list[int]:
    for name, value in values.items():
        number = -1 if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
        most = _MOST_RANKS if name == "dp_world_size" else _MOST
        if not 1 <= number <= most:
            raise ConfigError(f"{name} is {value!r}: it must be a whole number from 1 to {most:,}")
    return [operator.index(value) for value in values.values()]


def _check_choices(**values: str) -> None:
    for name, value in values.items():
        if value not in _CHOICES[name]:
            raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, _CHOICES[name]))}")


def _check_lengths(rollouts: Sequence[Rollout], lengths: np.ndarray, max_tokens: int, oversize: Oversize) -> None:
    for index in np.flatnonzero(lengths == 0)[:1].tolist():
        raise ConfigError(
            f"rollout {index} of prompt {rollouts[index].prompt_id!r} has no tokens: one that ended before its first token "
            "still holds its prompt; leave it out, or give the prompt"
        )
    over = np.flatnonzero(lengths > max_tokens) if oversize == "refuse" else np.empty(0, dtype=np.int64)
    if len(over):
        worst = int(over[lengths[over].argmax()])
        raise ConfigError(
            f"rollout {worst} of prompt {rollouts[worst].prompt_id!r} has {lengths[worst]} tokens, more than max_tokens = "
            f"{max_tokens} ({len(over)} of {len(rollouts)} rollouts are too long): raise max_tokens to {lengths[worst]}, "
            "shorten the rollouts, or give oversize='own' for a micro-batch of their own"
        )
