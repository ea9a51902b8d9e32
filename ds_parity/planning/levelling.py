"""Rollouts with costs, and exchanges of them between the micro-batches of a pass until these cost about the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_parity.planning.packing import Bins

# Larger windows are level to a fraction of a percent without a long search, which would take longer than sorting them.
_SEARCHED = 4096
# So many items of two bins are divided anew in all ways: (items, ways), 1 where an item is the first bin's.
_DIVIDED = 10
_WAYS = (np.arange(2**_DIVIDED) >> np.arange(_DIVIDED)[:, None] & 1).astype(np.float64)
_ANEW = 32  # pairs of bins in such a round: it is the costliest bin of a pass that matters
TOLERANCE = 1e-5
"""Of the time: what is less is not looked for."""


@dataclass(frozen=True)
class Items:
    """The rollouts of a window.

    Attributes:
        lengths: (n,) tokens, at most those of a micro-batch.
        costs: (n,) what each costs, in the whole numbers of `in_units`.
        padded: whether each one in a bin costs as much as the costliest there.
    """

    lengths: np.ndarray
    costs: np.ndarray
    padded: bool = False

    @cached_property
    def order(self) -> np.ndarray:
        """The items, costliest first."""
        return np.argsort(-self.costs, kind="stable")

    @cached_property
    def total(self) -> int:
        """The sum of all costs."""
        return int(self.costs.sum())

    @property
    def searched(self) -> bool:
        """Whether they are few enough for a long search."""
        return len(self.costs) <= _SEARCHED

    def loads(self, bins: Bins) -> np.ndarray:
        """Return (bins,) the cost of each."""
        if not self.padded:
            return sums(bins, self.costs)
        most = np.zeros(int(bins.max()) + 1, dtype=np.int64)
        np.maximum.at(most, bins, self.costs)
        return most * np.bincount(bins)

    def time(self, bins: Bins, ranks: int) -> int:
        """Return the sum over passes of the greatest cost, where bins of similar cost run together."""
        return _time(self.loads(bins), ranks)

    def least_time(self, ranks: int, max_tokens: int) -> float:
        """Return a lower bound of `time`: no packing takes less.

        It is at least the mean cost of a rank. Of the k x ranks + 1 longest rollouts no two share a micro-batch, if all
        are longer than half of one: k + 1 passes each take at least as long as the costliest, the (ranks + 1)th, and so
        on. These passes have room for so many tokens, and what is left runs after them.
        """
        tokens, work = self.lengths[self.order], self.costs[self.order].astype(np.float64)
        done, full = np.cumsum(work), np.cumsum(tokens)
        least, taken = self.total / ranks, 0.0
        for first in range(0, max(1, int((2 * tokens > max_tokens).sum())), ranks):
            taken += float(work[first])
            room = (first // ranks + 1) * ranks * max_tokens
            at = min(int(np.searchsorted(full, room)), len(work) - 1)  # the item that does not fit as a whole
            fits = float(done[at]) - float(work[at]) * max(0, int(full[at]) - room) / int(tokens[at])
            least = max(least, taken + (self.total - fits) / ranks)
        return least


def _time(loads: np.ndarray, ranks: int) -> int:
    """Return the sum over passes of the greatest of the loads, where similar ones run together."""
    return int((-np.sort(-loads))[::ranks].sum())


def sums(bins: Bins, values: np.ndarray) -> np.ndarray:
    """Return (bins,) the sums of whole numbers."""
    return np.bincount(bins, values).astype(np.int64)


class Levelling:
    """Exchanges of items between bins, many pairs of bins at once.

    In each round the costliest bin of a pass meets the cheapest, the second costliest the second cheapest, and so on.
    A pair exchanges the two items (or gives one for nothing) that bring it closest together. So no bin gives its last
    item away for nothing, which would leave the pair further apart.

    Args:
        items: the rollouts.
        bins: the bins to begin with, without a gap in their numbers.
        ranks: data-parallel ranks.
        max_tokens: the most tokens in a bin.
    """

    def __init__(self, items: Items, bins: Bins, ranks: int, max_tokens: int) -> None:
        self._items, self._ranks, self._max_tokens = items, ranks, max_tokens
        # One more item than there are: the empty place, which can be exchanged for an item.
        self._costs, self._lengths = np.append(items.costs, 0), np.append(items.lengths, 0)
        self._empty = len(items.costs)
        self._settle(bins)

    def _settle(self, bins: Bins) -> None:
        """Give each bin a stretch of places, four more than it has items."""
        self._loads, self._tokens = sums(bins, self._items.costs), sums(bins, self._items.lengths)
        counts = np.bincount(bins)
        self._sizes = counts + 4
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._places = np.full(int(self._sizes.sum()), self._empty)
        order = np.argsort(bins, kind="stable")
        within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._places[np.repeat(self._starts, counts) + within] = order

    def levelled(self) -> Bins:
        """Return the bins of the least time that was found."""
        rounds, width, patience = (200, 16, 8) if self._items.searched else (24, 8, 2)
        enough = self._items.least_time(self._ranks, self._max_tokens) * (1 + TOLERANCE)
        best, least, stale = self._bins(), self._time(), 0
        for number in range(rounds):
            if least <= enough or stale > patience:
                break
            if self._items.searched and number % 3 == 2:
                self._divide_anew(number)
            else:
                self._round(number, width)
            took = self._time()
            stale = stale + 1 if took >= least * (1 - TOLERANCE / 10) else 0
            if took < least:
                best, least = self._bins(), took
        return best

    def _bins(self) -> Bins:
        bins: Bins = np.empty(self._empty + 1, dtype=np.int64)
        bins[self._places] = np.repeat(np.arange(len(self._sizes)), self._sizes)
        return bins[:-1]

    def _time(self) -> int:
        return _time(self._loads, self._ranks)

    def _round(self, number: int, width: int) -> None:
        heavy, light = self._pairs(number, self._ranks)
        if not len(heavy):
            return
        width = min(width, int(self._sizes[np.append(heavy, light)].max()))
        give, take = self._some(heavy, number, width), self._some(light, number, width)
        given, taken = self._places[give], self._places[take]
        lighter = self._costs[given][:, :, None] - self._costs[taken][:, None, :]
        apart = self._loads[heavy] - self._loads[light]
        after = np.abs(apart[:, None, None] - 2 * lighter)
        after[self._refused(heavy, light, given, taken)] = np.iinfo(np.int64).max
        choice = after.reshape(len(heavy), -1).argmin(axis=1)
        better = np.flatnonzero(after.reshape(len(heavy), -1)[np.arange(len(heavy)), choice] < apart)
        i, j = choice[better] // width, choice[better] % width
        self._swap(heavy[better], light[better], give[better, i], take[better, j])

    def _divide_anew(self, number: int) -> None:
        """Divide ten items of each pair of bins anew, in the best of all ways to do so."""
        heavy, light = self._pairs(number // 3, max(1, _ANEW * self._ranks // len(self._loads)))
        if not len(heavy):
            return
        places = np.hstack([self._some(bins, number, _DIVIDED // 2) for bins in (heavy, light)])
        # A small bin has fewer places than are looked at: its items must not be counted twice.
        twice = (places[:, :, None] == places[:, None, :]) & np.tri(_DIVIDED, k=-1, dtype=bool)
        items = np.where(twice.any(axis=2), self._empty, self._places[places])
        apart = self._loads[heavy] - self._loads[light]
        after = np.abs(apart[:, None] - 2 * _lighter(self._costs[items]))
        after[self._overfull(heavy, light, items)] = np.inf
        choice = after.argmin(axis=1)
        rows = np.flatnonzero(after[np.arange(len(heavy)), choice] < apart)
        bins = np.append(self._bins(), 0)
        bins[items[rows]] = np.where(_WAYS.T[choice[rows]] > 0, heavy[rows, None], light[rows, None])
        self._settle(bins[:-1])

    def _overfull(self, heavy: np.ndarray, light: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return (pairs, ways): whether one of the two would have too many tokens."""
        shorter = _lighter(self._lengths[items])
        full: np.ndarray = self._tokens[light][:, None] + shorter > self._max_tokens
        full |= self._tokens[heavy][:, None] - shorter > self._max_tokens
        return full

    def _pairs(self, number: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bins that meet, in each pass at most so many; not in every round the same, which may be stuck."""
        order = np.argsort(-self._loads, kind="stable")
        passes = [order[first : first + self._ranks] for first in range(0, len(order), self._ranks)]
        heavy = [row[: len(row) // 2] for row in passes]
        light = [row[::-1][: len(row) // 2] for row in passes]
        if number % 4 > 1:
            light = [np.roll(row, number) for row in light]
        return np.concatenate([row[:most] for row in heavy]), np.concatenate([row[:most] for row in light])

    def _some(self, bins: np.ndarray, number: int, width: int) -> np.ndarray:
        """Return (bins, width) places of each bin: all of a small one, others of a large one in each round."""
        sizes = self._sizes[bins][:, None]
        places: np.ndarray = self._starts[bins][:, None] + (np.arange(width) * sizes // width + number) % sizes
        return places

    def _refused(self, heavy: np.ndarray, light: np.ndarray, given: np.ndarray, taken: np.ndarray) -> np.ndarray:
        shorter = self._lengths[given][:, :, None] - self._lengths[taken][:, None, :]
        full: np.ndarray = self._tokens[light][:, None, None] + shorter > self._max_tokens
        full |= self._tokens[heavy][:, None, None] - shorter > self._max_tokens
        return full

    def _swap(self, heavy: np.ndarray, light: np.ndarray, give: np.ndarray, take: np.ndarray) -> None:
        given, taken = self._places[give], self._places[take]
        self._places[give], self._places[take] = taken, given
        for held, values in ((self._loads, self._costs), (self._tokens, self._lengths)):
            moved = values[given] - values[taken]
            held[heavy] -= moved
            held[light] += moved


def _lighter(values: np.ndarray) -> np.ndarray:
    """Return (pairs, ways): what the first bin loses of the values (pairs, items), whose first half it has."""
    exact = values.astype(np.float64)  # whole numbers below 2**53 are, in any order of summing
    lighter: np.ndarray = exact[:, : _DIVIDED // 2].sum(axis=1, keepdims=True) - exact @ _WAYS
    return lighter
