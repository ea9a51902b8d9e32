"""Packing one window by cost: micro-batches of equal cost within a pass, and of at most `max_tokens` tokens.

Ranks wait in each pass for the one with the costliest micro-batch. So the time of a window is the sum over passes of
the greatest cost, and what is looked for is the packing with the least. Three steps find it for a number of passes:

1. `place` puts the costliest rollouts first where most is missing (Graham 1969, longest processing time), with room.
2. `Levelling` exchanges rollouts between the costliest and the cheapest micro-batches of each pass.
3. `_levels_reached` says what a micro-batch of each pass should cost in the next attempt: the same in all passes,
   except where a single rollout costs more. Its pass takes as long as it, so the other ranks get as much work in that
   pass as they have room for, and the other passes get less.

All of it computes with whole numbers and without ties, so that every rank finds the same plan on any processor: the
order of a sum, or of equal keys in a sort, is not the same on all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from ds_parity.planning.levelling import TOLERANCE, Items, Levelling
from ds_parity.planning.packing import Bins, costly_runs, fill
from ds_parity.planning.plans import fewest_passes

_LEAST_PER_PASS = 0.05  # of a mean pass: so much at least must a further one save
_FURTHER = 16  # a large window is packed into at most 1/16 more passes than by tokens


def in_units(costs: np.ndarray, total: float) -> tuple[np.ndarray, float]:
    """Return costs as whole numbers, and how many of these units one is.

    Sums of them are exact as floating-point numbers too, and times the number of bins fit into 64 bits.

    Args:
        costs: (n,) of each item.
        total: their sum, from whole numbers, so that it is the same on every processor.
    """
    unit = min(2.0**52, 2.0**61 / len(costs)) / total
    return np.maximum(1, np.rint(costs * unit)).astype(np.int64), unit


def cheapest(items: Items, per_pass: int, ranks: int, max_tokens: int, packed: Callable[[], Bins]) -> Bins:
    """Return the bins that take the least time; more passes than needed only where they save more than they cost.

    Args:
        items: the rollouts.
        per_pass: what a pass costs whatever it contains, in the items' units.
        ranks: data-parallel ranks.
        max_tokens: the most tokens in a micro-batch.
        packed: packs by tokens alone, into as few passes as can be found.
    """
    least, fewest = items.least_time(ranks, max_tokens), fewest_passes(items.lengths, ranks, max_tokens)
    # A pass costs a little at least: nobody means a tenth more passes for a thousandth less waiting.
    charge = max(per_pass, _LEAST_PER_PASS * items.total / ranks / fewest)
    if not items.searched:
        return _of_large_window(items, charge, ranks, max_tokens, fewest, packed)
    best: Bins | None = None
    time, worse = math.inf, 0
    for passes in range(fewest, -(-len(items.costs) // ranks) + 1):
        bins = level(items, ranks, max_tokens, passes)
        if bins is None and best is None:
            bins = _levelled(items, packed(), ranks, max_tokens)
        if bins is None:
            continue
        took = _took(items, bins, ranks, charge)
        worse = worse + 1 if took >= time else 0
        if not worse:
            best, time = bins, took
        if worse > 1 or time <= least + charge * (passes + 1):
            break
    return packed() if best is None else best


def _of_large_window(
    items: Items, charge: float, ranks: int, max_tokens: int, fewest: int, packed: Callable[[], Bins]
) -> Bins:
    """Return the bins of the fewest passes for which `level` finds room, or of `packed` where these take less time.

    The lower bound may be far from what fits, and every number of passes takes as long as sorting. So the numbers from
    there to that of `packed` are bisected.
    """
    bins = level(items, ranks, max_tokens, fewest)
    if bins is not None:
        return bins
    bins = _levelled(items, packed(), ranks, max_tokens)
    passes = _passes(bins, ranks)
    if not items.padded:  # there `packed` has the fewest
        most = min(passes + passes // _FURTHER, -(-len(items.costs) // ranks))
        passes = bisect_left(
            range(most),
            True,
            lo=fewest + 1,
            key=lambda n: _placed(items, _even(items, ranks, n), ranks, max_tokens) is not None,
        )
    other = level(items, ranks, max_tokens, passes)
    if other is None or _took(items, other, ranks, charge) >= _took(items, bins, ranks, charge):
        return bins
    return other


def _took(items: Items, bins: Bins, ranks: int, charge: float) -> float:
    return items.time(bins, ranks) + charge * _passes(bins, ranks)


def _passes(bins: Bins, ranks: int) -> int:
    return -(-(int(bins.max()) + 1) // ranks)


def _even(items: Items, ranks: int, passes: int) -> np.ndarray:
    """Return (passes,) what a bin of each should cost, were all alike."""
    return np.full(passes, max(1, items.total // (ranks * passes)))


def _placed(items: Items, levels: np.ndarray, ranks: int, max_tokens: int) -> Bins | None:
    count = min(len(levels) * ranks, len(items.costs))
    return place(items, np.repeat(levels, ranks)[:count], max_tokens)


def level(items: Items, ranks: int, max_tokens: int, passes: int) -> Bins | None:
    """Return bins of similar cost within each pass, without a gap in their numbers; None where they find no room."""
    count = min(passes * ranks, len(items.costs))
    if items.padded:
        runs = costly_runs(items.lengths, items.costs, max_tokens, count)
        return None if runs is None else fill(items.costs, runs, count)
    levels = _even(items, ranks, passes)
    best, least = None, 0
    for _ in range(4 if items.searched else 2):
        bins = _placed(items, levels, ranks, max_tokens)
        if bins is None:
            break
        bins = _levelled(items, _filled(items, bins, count), ranks, max_tokens)
        took = items.time(bins, ranks)
        if best is not None and took >= least * (1 - TOLERANCE):
            break
        best, least = bins, took
        levels = _levels_reached(items, bins, ranks, passes)
    return best


def _levelled(items: Items, bins: Bins, ranks: int, max_tokens: int) -> Bins:
    return bins if items.padded else Levelling(items, bins, ranks, max_tokens).levelled()


def _levels_reached(items: Items, bins: Bins, ranks: int, passes: int) -> np.ndarray:
    """Return the levels to try next: passes in which ranks wait stay as they are, the others share what is left."""
    loads = np.zeros(passes * ranks, dtype=np.int64)
    loads[: int(bins.max()) + 1] = -np.sort(-items.loads(bins))
    grid = loads.reshape(passes, ranks)
    levels = grid.max(axis=1)
    even = grid.sum(axis=1) >= levels * ranks * 0.999
    if even.any():
        levels[even] = int(grid[even].sum()) // (int(even.sum()) * ranks)
    return -np.sort(-levels)


def place(items: Items, targets: np.ndarray, max_tokens: int) -> Bins | None:
    """Put items, costliest first, into the bins that are furthest below their targets; None where there is no room.

    A part of the bins is filled at a time, the costliest item of that many into the emptiest: with few bins one.
    """
    order, count = items.order, len(targets)
    costs, lengths = items.costs[order], items.lengths[order]
    numbers = np.arange(count)
    # The number of the bin is part of the key: no two are equal, so any way of sorting gives one order.
    key = targets * count + (count - 1 - numbers)
    room = np.full(count, max_tokens, dtype=np.int64)
    chosen, at = np.empty(len(order), dtype=np.int64), 0
    while at < len(order):
        step = min(max(1, count // 8), len(order) - at)
        fitting = key[room >= lengths[at : at + step].max()]
        if not len(fitting):
            return None
        step = min(step, len(fitting))
        emptiest = np.partition(fitting, len(fitting) - step)[len(fitting) - step :]
        into = count - 1 - np.sort(emptiest)[::-1] % count
        end = at + step
        chosen[at:end] = into
        key[into] -= costs[at:end] * count
        room[into] -= lengths[at:end]
        at = end
    bins = np.empty(len(order), dtype=np.int64)
    bins[order] = chosen
    return bins


def _filled(items: Items, bins: Bins, count: int) -> Bins:
    """Return bins numbered without a gap, and the costliest of several items split until there are `count`."""
    used = np.flatnonzero(np.bincount(bins, minlength=count))
    if len(used) == count:
        return bins
    return fill(items.costs, np.searchsorted(used, bins), count)
