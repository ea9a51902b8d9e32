"""Packing one window: which rollouts share a micro-batch, in which pass, on which rank.

Few passes first, then ranks that wait little for each other. Best-fit decreasing (Johnson 1973, "Near-optimal bin packing
algorithms") says how many passes are needed; longest-processing-time (Graham 1969, "Bounds on multiprocessing timing
anomalies") levels the micro-batches, and exchanges between them find passes that it misses. Lengths are whole tokens, so
equal ones are packed together: without exchanges a window costs about as much as sorting it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

Bins = np.ndarray
"""(n,) int64: for each item the number of its bin, from 0 without a gap."""


def best_fit(lengths: np.ndarray, capacity: int) -> Bins:
    """Put each item, longest first, into the fullest bin that still holds it.

    Args:
        lengths: (n,) whole numbers in [1, capacity].
        capacity: of a bin (>= 1).
    """
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    bins = np.empty(len(lengths), dtype=np.int64)
    shelf, opened, at = _Shelf(), 0, 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        after = at + count
        while at < after:
            ids, free = shelf.take(length)
            if not free:
                ids, free = np.arange(opened, opened - (-(after - at) // (capacity // length))), capacity
                opened += len(ids)
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
    """Put each item, longest first, into the bin that holds least.

    Args:
        lengths: (n,) whole numbers.
        bins: how many there are (1 to n).
    """
    order = np.argsort(-lengths, kind="stable")
    heap = [(int(length), number) for number, length in enumerate(lengths[order[:bins]])]
    heapify(heap)
    chosen = list(range(bins))
    for length in lengths[order[bins:]].tolist():
        held, number = heap[0]
        heapreplace(heap, (held + length, number))
        chosen.append(number)
    result = np.empty(len(lengths), dtype=np.int64)
    result[order] = chosen
    return result


def exchange(lengths: np.ndarray, bins: Bins, capacity: int) -> Bins:
    """Swap items of the fullest bin for shorter ones of other bins until it holds no more than `capacity`, or none helps.

    Args:
        lengths: (n,) whole numbers.
        bins: what to begin with.
        capacity: when to stop.
    """
    result: Bins = bins.copy()
    loads = np.bincount(bins, lengths).astype(np.int64)
    while loads.max() > capacity:
        fullest = int(loads.argmax())
        own = np.flatnonzero(result == fullest)
        # How much lighter the fullest bin gets by giving one item for another, or (last column) for nothing to the emptiest.
        emptiest = int(loads.argmin())
        lighter = lengths[own, None] - np.append(lengths, 0)[None, :]
        other = np.append(loads[result], loads[emptiest])
        after = np.maximum(loads[fullest] - lighter, other[None, :] + lighter)
        after[:, :-1][:, result == fullest] = loads[fullest]
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
    """Cut the items, longest first, into runs whose count times their longest is at most `capacity`: padded micro-batches.

    No other choice needs fewer: the longest item's bin can be swapped, item by item, for the next longest.
    """
    order = np.argsort(-lengths, kind="stable")
    return _numbered(order, _starts(lengths[order], capacity))


def level_runs(lengths: np.ndarray, capacity: int, bins: int) -> Bins:
    """Cut the items into runs of the smallest capacity that needs no more than `bins` of them.

    Args:
        lengths: (n,) whole numbers.
        capacity: with which `sorted_runs` needs no more.
        bins: how many there may be.
    """
    order = np.argsort(-lengths, kind="stable")
    down = lengths[order]
    least = bisect_left(range(capacity), True, lo=int(down[0]), key=lambda c: len(_starts(down, c)) <= bins)
    return _numbered(order, _starts(down, least))


def _starts(down: np.ndarray, capacity: int) -> list[int]:
    # Where runs begin in lengths that go down.
    starts, at = [], 0
    while at < len(down):
        starts.append(at)
        at += max(1, capacity // int(down[at]))
    return starts


def _numbered(order: np.ndarray, starts: list[int]) -> Bins:
    result = np.empty(len(order), dtype=np.int64)
    result[order] = np.repeat(np.arange(len(starts)), np.diff([*starts, len(order)]))
    return result


def fill(lengths: np.ndarray, bins: Bins, places: int) -> Bins:
    """Split the fullest bins that hold several items in halves until there are `places` bins.

    Args:
        lengths: (n,) whole numbers.
        bins: what is split.
        places: how many bins are wanted (no more than n).
    """
    order = np.argsort(bins, kind="stable")
    used = int(bins.max()) + 1
    held = np.split(order, np.searchsorted(bins[order], np.arange(1, used))) if places > used else []
    heap = [(-int(lengths[items].sum()), number) for number, items in enumerate(held) if len(items) > 1]
    heapify(heap)
    result: Bins = bins.copy()
    for number in range(used, places):
        _, fullest = heappop(heap)
        items = held[fullest]
        halves = level(lengths[items], 2)
        held[fullest] = items[halves == 0]
        held.append(items[halves == 1])
        result[held[number]] = number
        for split in (fullest, number):
            if len(held[split]) > 1:
                heappush(heap, (-int(lengths[held[split]].sum()), split))
    return result


class _Shelf:
    """Open bins by what they still hold."""

    def __init__(self) -> None:
        self._bins: dict[int, np.ndarray] = {}
        self._sizes: list[int] = []

    def take(self, length: int) -> tuple[np.ndarray, int]:
        """Take the bins that hold `length` most tightly, and what each holds; none and 0 where none does."""
        found = bisect_left(self._sizes, length)
        if found == len(self._sizes):
            return np.empty(0, dtype=np.int64), 0
        size = self._sizes.pop(found)
        return self._bins.pop(size), size

    def put(self, ids: np.ndarray, size: int) -> None:
        """Put bins back; full ones are done with."""
        if not len(ids) or not size:
            return
        if size not in self._bins:
            insort(self._sizes, size)
        self._bins[size] = np.concatenate((self._bins[size], ids)) if size in self._bins else ids
