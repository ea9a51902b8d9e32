"""Packing one window: which rollouts share a micro-batch.

The aim is few passes first, then ranks that wait little for each other. Best-fit decreasing (Johnson 1973,
"Near-optimal bin packing algorithms") says how many passes are needed. Longest-processing-time (Graham 1969, "Bounds on
multiprocessing timing anomalies") levels the micro-batches, and exchanges between them save passes that it misses.
Lengths are whole numbers of tokens, so items of one length are packed together: without exchanges a window costs about
as much as sorting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

Bins = np.ndarray
"""(n,) int64: for each item the number of its bin; bins are numbered from 0 without a gap."""


def best_fit(lengths: np.ndarray, capacity: int) -> Bins:
    """Put each item, longest first, into the fullest bin that still has room for it.

    Args:
        lengths: (n,) whole numbers in [1, capacity].
        capacity: the capacity of a bin (>= 1).
    """
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    bins = np.empty(len(lengths), dtype=np.int64)
    shelf, opened, at = _Shelf(), 0, 0  # at: how many items of `order` have their bin
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        after = at + count
        while at < after:
            ids, free = shelf.take(length)
            if not free:
                # Open as many bins as the items of this length need; -(-a // b) is a / b rounded up.
                ids, free = np.arange(opened, opened - (-(after - at) // (capacity // length))), capacity
                opened += len(ids)
            # All these bins have the same room, so they take the same number of items: some full, one partly.
            each = free // length
            full, rest = divmod(min(after - at, each * len(ids)), each)
            chosen = np.repeat(ids[: full + 1], [*[each] * full, *[rest] * (len(ids) > full)])
            bins[order[at : at + len(chosen)]] = chosen
            at += len(chosen)
            shelf.put(ids[:full], free - each * length)
            shelf.put(ids[full : full + 1], free - rest * length)
            shelf.put(ids[full + 1 :], free)
    return bins


def level(lengths: np.ndarray, bins: int) -> Bins:
    """Put each item, longest first, into the bin with the smallest sum so far.

    Args:
        lengths: (n,) whole numbers.
        bins: how many bins there are (1 to n).
    """
    order = np.argsort(-lengths, kind="stable")
    heap = [(int(length), number) for number, length in enumerate(lengths[order[:bins]])]
    heapify(heap)
    chosen = list(range(bins))
    for length in lengths[order[bins:]].tolist():
        load, number = heap[0]
        heapreplace(heap, (load + length, number))
        chosen.append(number)
    result = np.empty(len(lengths), dtype=np.int64)
    result[order] = chosen
    return result


def exchange(lengths: np.ndarray, bins: Bins, capacity: int) -> Bins:
    """Swap items of the fullest bin for shorter ones of other bins, until all fit or no swap helps.

    Args:
        lengths: (n,) whole numbers.
        bins: the bins to begin with; they are not changed.
        capacity: the greatest sum of a bin with which it fits.
    """
    result: Bins = bins.copy()
    loads = np.bincount(bins, lengths).astype(np.int64)
    while loads.max() > capacity:
        fullest = int(loads.argmax())
        own = np.flatnonzero(result == fullest)
        # How much lighter the fullest bin gets by giving one item for another, or (last column) for nothing to the
        # emptiest bin.
        emptiest = int(loads.argmin())
        lighter = lengths[own, None] - np.append(lengths, 0)[None, :]
        other = np.append(loads[result], loads[emptiest])
        after = np.maximum(loads[fullest] - lighter, other[None, :] + lighter)
        after[:, :-1][:, result == fullest] = loads[fullest]  # a swap inside the fullest bin changes nothing
        give, take = np.unravel_index(after.argmin(), after.shape)
        if after[give, take] >= loads[fullest]:
            break
        to = emptiest if take == len(lengths) else int(result[take])
        loads[[fullest, to]] += np.array([-1, 1]) * lighter[give, take]
        if take < len(lengths):
            result[take] = fullest
        result[own[give]] = to
    return result


def sorted_runs(lengths: np.ndarray, capacity: int) -> Bins:
    """Cut the items, longest first, into padded micro-batches: runs whose count times their longest fits.

    No other choice needs fewer bins: in any other one, the items beside the longest can be exchanged, one by one, for
    the next longest, and still fit.

    Args:
        lengths: (n,) whole numbers in [1, capacity].
        capacity: the greatest count times longest (>= 1).
    """
    order = np.argsort(-lengths, kind="stable")
    return _numbered(order, _starts(capacity // lengths[order]))


def level_runs(lengths: np.ndarray, capacity: int, bins: int) -> Bins:
    """Cut the items into runs of the smallest capacity that needs no more than `bins` of them.

    Args:
        lengths: (n,) whole numbers.
        capacity: one with which `sorted_runs` needs no more than `bins`.
        bins: how many bins there may be.
    """
    order = np.argsort(-lengths, kind="stable")
    down = lengths[order]
    # A smaller capacity never needs fewer runs, so the smallest one can be bisected.
    least = bisect_left(range(capacity), True, lo=int(down[0]), key=lambda c: len(_starts(c // down)) <= bins)
    return _numbered(order, _starts(least // down))


def costly_runs(lengths: np.ndarray, costs: np.ndarray, capacity: int, bins: int) -> Bins | None:
    """Cut the items into runs of the smallest cost (count times the costliest) that needs no more than `bins` of them.

    Args:
        lengths: (n,) whole numbers.
        costs: (n,) whole numbers; a longer item does not cost less.
        capacity: the greatest count times longest.
        bins: how many bins there may be.

    Returns:
        None where they need more bins at any cost.
    """
    order = np.lexsort((-lengths, -costs))
    down, most = costs[order], capacity // lengths[order]
    if len(_starts(most)) > bins:
        return None
    dearest = int(down[0]) * len(down)
    least = bisect_left(range(dearest), True, key=lambda c: len(_starts(np.minimum(most, c // down))) <= bins)
    return _numbered(order, _starts(np.minimum(most, least // down)))


def _starts(counts: np.ndarray) -> list[int]:
    """Return where runs begin.

    Args:
        counts: (n,) how many items a run has that begins with this one; one at least.
    """
    following, starts, at = counts.tolist(), [], 0
    while at < len(following):
        starts.append(at)
        at += max(1, following[at])
    return starts


def _numbered(order: np.ndarray, starts: list[int]) -> Bins:
    """Return the run of each item, from the items in order and the places where runs begin."""
    result = np.empty(len(order), dtype=np.int64)
    result[order] = np.repeat(np.arange(len(starts)), np.diff([*starts, len(order)]))
    return result


def fill(lengths: np.ndarray, bins: Bins, places: int) -> Bins:
    """Split the fullest bins of several items into halves until there are `places` bins.

    Args:
        lengths: (n,) whole numbers.
        bins: the bins to begin with; they are not changed.
        places: how many bins are wanted (no more than n).
    """
    order = np.argsort(bins, kind="stable")
    used = int(bins.max()) + 1
    contents = np.split(order, np.searchsorted(bins[order], np.arange(1, used))) if places > used else []
    heap = [(-int(lengths[items].sum()), number) for number, items in enumerate(contents) if len(items) > 1]
    heapify(heap)
    result: Bins = bins.copy()
    for number in range(used, places):
        _, fullest = heappop(heap)
        items = contents[fullest]
        halves = level(lengths[items], 2)
        contents[fullest] = items[halves == 0]
        contents.append(items[halves == 1])
        result[contents[number]] = number
        for split in (fullest, number):
            if len(contents[split]) > 1:
                heappush(heap, (-int(lengths[contents[split]].sum()), split))
    return result


class _Shelf:
    """The open bins, by how much room they have left."""

    def __init__(self) -> None:
        self._bins: dict[int, np.ndarray] = {}
        self._sizes: list[int] = []

    def take(self, length: int) -> tuple[np.ndarray, int]:
        """Take the bins with the least room that `length` fits into, and return them with that room.

        Where it fits into none, these are no bins and 0.
        """
        tightest = bisect_left(self._sizes, length)
        if tightest == len(self._sizes):
            return np.empty(0, dtype=np.int64), 0
        size = self._sizes.pop(tightest)
        return self._bins.pop(size), size

    def put(self, ids: np.ndarray, size: int) -> None:
        """Put bins with `size` room back; full ones are not kept."""
        if not len(ids) or not size:
            return
        if size not in self._bins:
            insort(self._sizes, size)
        self._bins[size] = np.concatenate((self._bins[size], ids)) if size in self._bins else ids
