"""A block of steps, field by field: what `rows` says of each step, computed for all of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ds_parity.parity.comparison.blocks import Block
from ds_parity.parity.comparison.fields import FIELDS, Field, How
from ds_parity.parity.comparison.rows import field_differences
from ds_parity.parity.comparison.ruler import Ruler
from ds_parity.trace.columns import Array, Column, Columns, known
from ds_parity.trace.quick import COUNTS
from ds_parity.trace.records import METRIC

# A sum of squares is rounded here otherwise than in math.dist: so near to a bound, a step is judged by itself.
_NEAR = 1e-9


@dataclass(frozen=True, slots=True)
class Apart:
    """One field in the n steps of a block.

    Attributes:
        known: both traces have it; (n,).
        gap: how far it lies apart (>= 0, or NaN), meaningless where it isn't known; (n,).
        limit: what the gap may be; (n,), 0 where it must be equal bit for bit.
        slack: the part of the limit that the digits leave open which it was written with; (n,).
        differs: it is not within its limit; (n,).
    """

    known: Array
    gap: Array
    limit: Array
    slack: Array
    differs: Array


def judge(block: Block, ruler: Ruler) -> dict[str, Apart]:
    """Judge every compared field of a block, or `step` where one of the traces doesn't have its steps."""
    a, b = block.reference, block.candidate
    none = np.zeros(len(block.steps))
    if a is None or b is None:
        return {"step": Apart(none.astype(bool), none, none, none, np.ones(len(none), dtype=bool))}
    names = {name for side in (a, b) for held in side.fields["metrics"] for name in held}
    fields = (*FIELDS, *(Field(METRIC + name, How.BOUNDED) for name in sorted(names)))
    left_out = {field.name for field in fields if field.name.startswith(METRIC) and "metrics" in ruler.left_out}
    left_out |= ruler.left_out
    return {field.name: _apart(field, block, a, b, ruler) for field in fields if field.name not in left_out}


def limits(name: str, block: Block, ruler: Ruler) -> Array:
    """The bound of a field in every step of a block; (n,)."""
    bound = ruler.bound(name, 1)
    return np.asarray(bound.constant * bound.eps * np.sqrt(np.maximum(np.array(block.terms, dtype=float), 1.0)))


def signed(reference: Array, candidate: Array, floor: float) -> Array:
    """`bounds.signed` of many numbers."""
    with np.errstate(all="ignore"):
        difference = candidate - reference
        scale = np.abs(reference)
        scale = np.where(floor > scale, floor, scale)
        found = np.where(scale == 0, np.copysign(np.inf, difference), difference / scale)
    return np.where(reference == candidate, 0.0, found)


def _apart(field: Field, block: Block, a: Columns, b: Columns, ruler: Ruler) -> Apart:
    name = field.name
    if name in ruler.written:
        return _one_by_one(field, block, ruler)
    bound = limits(name, block, ruler) if ruler.bounds(field) else None
    if (values := a.values(name)) == b.values(name) and _plain(name, values):
        none = np.zeros(len(values))
        return Apart(known(values), none, none if bound is None else bound, none, none.astype(bool))
    if name == "lr":
        found = _rates(a.lists(name), b.lists(name))
    elif name == "weights":
        found = _weights(a, b, bound)
    elif name in COUNTS or name == "skipped":
        found = _counts(a.counts(name), b.counts(name))
    else:
        found = _figures(a.floats(name), b.floats(name), ruler.scale(name), bound)
    return _one_by_one(field, block, ruler) if found is None else _exactly(field, block, ruler, found)


def _plain(name: str, values: Sequence[Any]) -> bool:
    """Whether values that equal others are so bit for bit: they hold neither NaN, which may be the same object, nor zeros."""
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
    return _found(x, y, np.abs(x.values - y.values).astype(float), x.values != y.values)


def _figures(x: Column, y: Column, floor: float, bound: Array | None) -> Apart:
    gap = np.abs(signed(x.values, y.values, floor))
    return _found(x, y, gap, _nan(x) | _nan(y) | (_unlike(x, y) if bound is None else ~(gap <= bound)), bound)


def _rates(x: Column | None, y: Column | None) -> Apart | None:
    if x is None or y is None:
        return None
    if x.values.shape == y.values.shape:
        gap = np.abs(signed(x.values, y.values, 0.0)).max(axis=1, initial=0.0)
        return _found(x, y, gap, _nan(x) | _nan(y) | _unlike(x, y).any(axis=1))
    return _found(x, y, np.full(len(x.known), np.inf), np.ones(len(x.known)))


def _weights(a: Columns, b: Columns, bound: Array | None) -> Apart | None:
    x, y = a.lists("weights"), b.lists("weights")
    if x is None or y is None:
        return None
    norms = a.norms(), b.norms()
    nan = _nan(x) | _nan(y) | _nan(norms[0]) | _nan(norms[1])
    alike = x.values.shape == y.values.shape
    gap = _distance(*norms, x.values, y.values) if alike else np.abs(signed(norms[0].values, norms[1].values, 0.0))
    if bound is None:
        return _found(x, y, gap, nan | (a.checksums != b.checksums))
    return _found(x, y, gap, nan | ~(gap <= bound) | (not alike), bound)


def _distance(norm: Column, other: Column, a: Array, b: Array) -> Array:
    """`bounds.gap` of weights."""
    norms = np.abs(signed(norm.values, other.values, 0.0))
    size = norm.values
    if not a.shape[1]:
        return norms
    with np.errstate(all="ignore"):
        difference = np.abs(a - b)
        most = difference.max(axis=1)
        squares = np.square(difference / most[:, None]).sum(axis=1)
        distance = most * np.sqrt(squares / a.shape[1])
        distance = np.where(np.isinf(difference).any(axis=1), np.inf, distance) / size
    unfit = ~((size > 0) & (size < np.inf))
    return np.where((a == b).all(axis=1), norms, np.maximum(norms, np.where(unfit, np.inf, distance)))


def _unlike(x: Column, y: Column) -> Array:
    """Whether bits differ."""
    return np.asarray(x.values.view(np.int64) != y.values.view(np.int64))


def _nan(x: Column) -> Array:
    return np.asarray(np.isnan(x.values.reshape(len(x.known), -1)).any(axis=1))


def _found(x: Column, y: Column, gap: Array, apart: Array, bound: Array | None = None) -> Apart:
    both, none = x.known & y.known, np.zeros(len(gap))
    return Apart(both, gap, none if bound is None else bound, none, (x.known != y.known) | (both & apart.astype(bool)))


def _exactly(field: Field, block: Block, ruler: Ruler, found: Apart) -> Apart:
    if field.name == "weights" and ruler.bounds(field):
        near = found.known & (np.abs(found.gap - found.limit) <= _NEAR * found.limit)
        for at in np.flatnonzero(near).tolist():
            found.differs[at] = any(field_differences(field, block.pair(at), ruler))
    return found


def _one_by_one(field: Field, block: Block, ruler: Ruler) -> Apart:
    """What has no columns, and what was rounded when it was written."""
    name, count = field.name, len(block.steps)
    bound = limits(name, block, ruler) if ruler.bounds(field) else np.zeros(count)
    pairs = [block.pair(at) for at in range(count)]
    gaps = [ruler.gap(pair, name) for pair in pairs]
    slack = np.array([ruler.slack(pair, name) for pair in pairs])
    return Apart(
        known=np.array([gap is not None for gap in gaps]),
        gap=np.array([np.nan if gap is None else gap for gap in gaps]),
        limit=bound + slack,
        slack=slack,
        differs=np.array([any(field_differences(field, pair, ruler)) for pair in pairs]),
    )
