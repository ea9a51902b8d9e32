"""The verdict on a block of steps, field by field: the one place that decides what differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ds_parity.parity.comparison import distances
from ds_parity.parity.comparison.blocks import Block
from ds_parity.parity.comparison.fields import FIELDS
from ds_parity.parity.comparison.ruler import Ruler
from ds_parity.trace.columns import Array, Column, Columns, known
from ds_parity.trace.quick import COUNTS
from ds_parity.trace.records import METRIC

_TINY = float(np.finfo(float).tiny)  # the last bit of a zero is no part of a value


@dataclass(frozen=True, slots=True)
class Apart:
    """One field in the n steps of a block.

    Attributes:
        known: both traces have it; (n,).
        gap: how far it lies apart (>= 0, or NaN), meaningless where it isn't known; (n,). Counts: the difference.
            Floats: relative, over no less than the ruler's scale. LRs: the greatest of the groups, infinite where their
            numbers differ. Weights: their distance over the norm of the reference.
        limit: what the gap may be; (n,), 0 where it must be equal bit for bit.
        slack: the part of the limit that the digits leave open which it was written with; (n,).
        differs: it is not within its limit; (n,).
    """

    known: Array
    gap: Array
    limit: Array
    slack: Array
    differs: Array


Judged = dict[str, Apart]


def judge(block: Block, ruler: Ruler) -> Judged:
    """Judge every compared field of a block, or `step` where one of the traces doesn't have its steps."""
    a, b = block.reference, block.candidate
    none = np.zeros(len(block.steps))
    if a is None or b is None:
        return {"step": Apart(none.astype(bool), none, none, none, np.ones(len(none), dtype=bool))}
    names = [field.name for field in FIELDS if field.name not in ruler.left_out]
    if "metrics" not in ruler.left_out:
        names += sorted({METRIC + name for side in (a, b) for metrics in side.fields["metrics"] for name in metrics})
    return {name: _apart(name, block, a, b, ruler) for name in names}


def limits(name: str, block: Block, ruler: Ruler) -> Array:
    """The bound of a field in every step of a block, 0 where it must be equal bit for bit; (n,)."""
    if not ruler.bounds(name):
        return np.zeros(len(block.steps))
    bound = ruler.bound(name, 1)
    terms = np.sqrt(np.maximum(np.array(block.terms, dtype=float), 1.0))
    limit = bound.constant * bound.eps * terms
    return np.asarray(np.fmin(limit, ruler.explained(terms, block.travelled)) if name == "weights" else limit)


def _apart(name: str, block: Block, a: Columns, b: Columns, ruler: Ruler) -> Apart:
    bound = limits(name, block, ruler)
    values = a.values(name)
    if name not in ruler.written and values == b.values(name) and _plain(name, values):
        none = np.zeros(len(values))
        return Apart(known(values), none, bound, none, none.astype(bool))
    if name in COUNTS or name == "skipped":
        return _counts(a.counts(name), b.counts(name))
    if name == "weights":
        return _weights(a, b, bound, ruler)
    return _floats(name, a, b, bound, ruler)


def _plain(name: str, values: Sequence[Any]) -> bool:
    """Whether values that equal others are so bit for bit: none is NaN, which may be the same object, or a zero."""
    if name in COUNTS or name == "skipped":
        return True
    if name == "weights":
        return not math.isnan(sum(it[1] + sum(it[2]) for it in values if it is not None))
    if name == "lr":
        values = list(chain.from_iterable(it for it in values if it is not None))
    elif None in values:
        values = [value for value in values if value is not None]
    return 0.0 not in values and not math.isnan(sum(values))


def _counts(x: Column, y: Column) -> Apart:
    none = np.zeros(len(x.known))
    both = x.known & y.known
    differs = (x.known != y.known) | (both & (x.values != y.values))
    return Apart(both, np.abs(x.values - y.values).astype(float), none, none, differs)


def _floats(name: str, a: Columns, b: Columns, bound: Array, ruler: Ruler) -> Apart:
    """A float of every step, or the LRs of its parameter groups: a step is as far apart as its farthest number."""
    x, y, inside = _side_by_side(name, a, b)
    both, scale = x.known & y.known, ruler.scale(name)
    same_width = inside[0] == inside[1]
    gap = distances.greatest_of_rows(np.abs(distances.signed(x.values, y.values, scale)))
    gap = np.where(same_width, gap, np.inf)
    equal = gap <= bound if ruler.bounds(name) else ~distances.other_bits(x.values, y.values).any(axis=1)
    slack = np.zeros(len(both))
    if name in ruler.written:
        leaves = ruler.slack(name, x.values, y.values)
        size = distances.over(x.values, scale)
        with np.errstate(all="ignore"):
            near = np.abs(x.values - y.values) <= bound[:, None] * size + leaves
            share = np.where((size >= _TINY) & (size < np.inf), leaves / size, 0.0)
        finite = np.isfinite(x.values) & np.isfinite(y.values)
        equal |= np.where(finite, near, x.values == y.values).all(axis=1)
        counted = np.arange(x.values.shape[1]) < np.minimum(*inside)[:, None]
        slack = np.where(both, distances.greatest_of_rows(np.where(counted, share, 0.0)), 0.0)
    nan = (np.isnan(x.values) | np.isnan(y.values)).any(axis=1)
    differs = (x.known != y.known) | (both & (nan | ~same_width | ~equal))
    return Apart(both, gap, bound + slack, slack, differs)


def _side_by_side(name: str, a: Columns, b: Columns) -> tuple[Column, Column, tuple[Array, Array]]:
    """Both traces' numbers, each (n, width), filled up with zeros; and how many of each step are its own, each (n,)."""
    if name == "lr":
        widths = a.widths(), b.widths()
        width = int(max(it.max(initial=0) for it in widths))
        return a.rates(width), b.rates(width), widths
    x, y = (Column(it.values[:, None], it.known) for it in (a.floats(name), b.floats(name)))
    ones = np.ones(len(x.known), dtype=int)
    return x, y, (ones, ones)


def _weights(a: Columns, b: Columns, bound: Array, ruler: Ruler) -> Apart:
    x, y = a.weights(), b.weights()
    gap, nan, same_width = distances.of_weights(x, y)
    equal = same_width & (gap <= bound) if ruler.bounds("weights") else x.checksums == y.checksums
    both = x.known & y.known
    return Apart(both, gap, bound, np.zeros(len(both)), (x.known != y.known) | (both & (nan | ~equal)))
