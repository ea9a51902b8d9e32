"""From rollouts to windows, and from windows to micro-batches on ranks, before anything runs.

Windows are cut first, by the order of arrival alone. So they, their boundaries and the LR are the same for any number
of ranks and any `max_tokens`. The contents of a window are packed then (`packing.py`): into as few passes as can be
reached, with little waiting in each pass, and with about the same work for every rank over all of them. Work is tokens,
or what a `Cost` makes of them (`balancing.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from ds_parity.planning.balancing import cheapest, in_units
from ds_parity.planning.checks import check_choices, check_lengths, listed, numbers, sizes_of
from ds_parity.planning.costs import Cost, check_is_cost
from ds_parity.planning.levelling import Items
from ds_parity.planning.packing import best_fit, exchange, fill, level, level_runs, sorted_runs
from ds_parity.planning.plans import Layout, Plan, WindowPlan, fewest_passes, rollout_key
from ds_parity.planning.rollout import Unit

Count = Literal["rollout", "prompt"]
Oversize = Literal["refuse", "own"]

# In larger windows best-fit decreasing reaches the lower bound by itself, and a search takes longer than it saves.
_SEARCHED = 4096


@dataclass(frozen=True)
class _Bounds:
    ranks: int
    max_tokens: int
    layout: Layout
    cost: Cost | None


def plan(
    rollouts: Iterable[Unit],
    *,
    dp_world_size: int,
    target: int,
    max_tokens: int,
    count: Count = "rollout",
    layout: Layout = "packed",
    oversize: Oversize = "refuse",
    cost: Cost | None = None,
) -> Plan:
    """Plan the optimizer steps of rollouts. The same arguments always give the same plan.

    Args:
        rollouts: in the order of arrival: whole rollouts, turns of them (`by_turn`), or preference pairs.
        dp_world_size: data-parallel ranks (>= 1).
        target: rollouts (pairs, where these are given), or with `count: prompt` prompts, that close a window (>= 1).
        max_tokens: the most tokens in a micro-batch (>= 1): their sum where it is packed, rows x longest where padded.
        count: `rollout`, or `prompt`: a window holds whole prompts, in the order in which they are complete.
        layout: how micro-batches are collated: `packed` end to end, or `padded` to the longest.
        oversize: a rollout of more than `max_tokens` is refused, or gets a micro-batch of its `own`.
        cost: what a micro-batch costs. Ranks of a pass are then given equal cost in place of equal tokens, in more
            passes than needed only where these cost less than the waiting that they save. None: plan by tokens.

    Raises:
        ConfigError: a number or a choice is none of these, something is no rollout, or one is empty or longer than
            `max_tokens`, or `cost` is no `Cost`.
    """
    rollouts = listed(rollouts)
    dp_world_size, target, max_tokens = numbers(dp_world_size=dp_world_size, target=target, max_tokens=max_tokens)
    check_choices(count=count, layout=layout, oversize=oversize)
    check_is_cost(cost)
    lengths, squares = sizes_of(rollouts, layout)
    check_lengths(rollouts, lengths, max_tokens, oversize)
    order, ends = _windows(rollouts, target, count)
    bounds = _Bounds(dp_world_size, max_tokens, layout, cost)
    windows = tuple(_packed(order[start:end], lengths, squares, bounds) for start, end in pairwise([0, *ends]))
    left = order[ends[-1] if ends else 0 :]
    return Plan(windows, left, rollouts, lengths, squares, dp_world_size, max_tokens, layout, cost)


def _windows(rollouts: Sequence[Unit], target: int, count: Count) -> tuple[np.ndarray, list[int]]:
    """Return the rollouts' indices in the order of their windows, and where each full window ends."""
    if count == "rollout" and all(rollout.rollout_id is None for rollout in rollouts):
        return np.arange(len(rollouts)), list(range(target, len(rollouts) + 1, target))
    # A rollout of several turns, or a prompt, enters a window where its last sequence arrives.
    keys = [r.prompt_id if count == "prompt" else rollout_key(r, index) for index, r in enumerate(rollouts)]
    complete = {key: index for index, key in enumerate(keys)}
    number = {key: place for place, key in enumerate(sorted(complete, key=complete.__getitem__))}
    places = np.fromiter((number[key] for key in keys), dtype=np.int64, count=len(rollouts))
    after = np.cumsum(np.bincount(places, minlength=len(number)))
    return np.argsort(places, kind="stable"), after[target - 1 :: target].tolist()


def _packed(window: np.ndarray, lengths: np.ndarray, squares: np.ndarray, bounds: _Bounds) -> WindowPlan:
    """Return the plan of one window, given as indices of rollouts."""
    own, ranks = lengths[window], bounds.ranks
    items, per_pass = _items(own, squares[window], bounds)
    if items.lengths.min() == items.lengths.max() and items.costs.min() == items.costs.max():
        bins = _slices(items.lengths, ranks, bounds.max_tokens)
    else:
        packed = partial(_bins, items.lengths, ranks, bounds.max_tokens, bounds.layout)
        bins = packed() if bounds.cost is None else cheapest(items, per_pass, ranks, bounds.max_tokens, packed)
    sizes = _sizes(own, bins, bounds.layout)
    places = _places(sizes if bounds.cost is None else items.loads(bins), ranks)
    passes = -(-len(sizes) // ranks)
    grid = np.zeros(passes * ranks, dtype=np.int64)
    grid[places] = sizes
    order = np.argsort(places[bins], kind="stable")
    ends = np.cumsum(np.bincount(places[bins], minlength=passes * ranks))
    return WindowPlan(window[order], ends.reshape(passes, ranks), grid.reshape(passes, ranks))


def _items(lengths: np.ndarray, squares: np.ndarray, bounds: _Bounds) -> tuple[Items, int]:
    """Return the rollouts of a window, and what a pass costs in their units."""
    capped = np.minimum(lengths, bounds.max_tokens)  # a longer one fills a micro-batch by itself
    if bounds.cost is None:
        return Items(capped, lengths), 0
    total = bounds.cost.of(int(lengths.sum()), int(squares.sum()))
    costs, unit = in_units(bounds.cost.of(lengths, squares), total)
    return Items(capped, costs, bounds.layout == "padded"), round(bounds.cost.per_pass * unit)


def _slices(lengths: np.ndarray, ranks: int, max_tokens: int) -> np.ndarray:
    """Return the bins of items of one length: slices in the order of arrival, as with a fixed batch size."""
    count = len(lengths)
    fewest = -(-count // (max_tokens // int(lengths[0])))
    places = min(-(-fewest // ranks) * ranks, count)
    return np.arange(count) * places // count


def _bins(lengths: np.ndarray, ranks: int, max_tokens: int, layout: Layout) -> np.ndarray:
    """Return the bin of each item: few enough for few passes, and then as many as these passes have places for."""
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
    """Return items in bins of about the same size, None where one would be too full."""
    chosen = level(lengths, bins)
    if len(lengths) <= _SEARCHED:
        chosen = exchange(lengths, chosen, max_tokens)
    return chosen if np.bincount(chosen, lengths).max() <= max_tokens else None


def _sizes(lengths: np.ndarray, bins: np.ndarray, layout: Layout) -> np.ndarray:
    """Return (bins,) the tokens that each micro-batch computes on, padding included."""
    if layout == "packed":
        return np.bincount(bins, lengths).astype(np.int64)
    longest = np.zeros(int(bins.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, bins, lengths)
    return longest * np.bincount(bins)


def _places(sizes: np.ndarray, ranks: int) -> np.ndarray:
    """Return pass * ranks + rank for each micro-batch.

    Micro-batches of similar size run in the same pass, and the largest of a pass goes to the rank with the least work
    so far.
    """
    order = np.argsort(-sizes, kind="stable")
    done = np.zeros(ranks, dtype=np.int64)
    places = np.empty(len(sizes), dtype=np.int64)
    for first in range(0, len(sizes), ranks):
        row = order[first : first + ranks]
        chosen = np.argsort(done, kind="stable")[: len(row)]
        places[row] = first + chosen
        done[chosen] += sizes[row]
    return places
