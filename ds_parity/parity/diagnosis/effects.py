"""How far weights would be apart if the numbers that are logged were those that were trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ds_parity.parity.comparison.bounds import LEAST_LOSS
from ds_parity.trace import StepRecord, Trace

_LIMIT = 0.01  # RL clips at 0.1 to 1, as a rule
Pairs = Sequence[tuple[StepRecord, StepRecord]]

COUNTED = {"rollouts", "tokens", "prompts", "passes", "idle_passes"}
# How a window is split into micro-batches, which its step does not depend on.
SPLIT = {"passes", "idle_passes"}
# What updates follow from: a loss that is off has another gradient, as a rule, and counts are what it is divided by.
TRAINED_ON = {"loss", "grad_norm", "lr", "rollouts", "tokens", "prompts", "total"}


def effect(name: str, pairs: Pairs, lengths: Sequence[float] | None) -> float:
    """Return how far one field would take the weights apart, as a share (0 to 1) of what training moves them.

    A rate that is off in the last step alone, where it is small, moves them by little.

    Args:
        name: of the field.
        pairs: the steps of both sides.
        lengths: of the steps, as `step_lengths` returns them; None: each counts as if it were the whole way.
    """
    shares = [_share(name, pair) for pair in pairs]
    if lengths is None:
        return max(shares, default=1.0)
    return min(1.0, math.hypot(*(share * length for share, length in zip(shares, lengths, strict=True))))


def loss_by_rates(pairs: Pairs) -> float:
    """Return how far other learning rates would have moved a later loss, by a first-order estimate.

    A step of SGD lowers the loss by its rate times the square of the gradient norm, optimizers that divide a gradient
    by its size by the rate times the norm and more, and SGD that clips by the rate times the norm times the limit. The
    smallest is counted, with a limit of 0.01, since a trace does not say what its run has clipped. Of several parameter
    groups it isn't known whose gradient is long, so that the one whose rates differ least counts for all.

    Args:
        pairs: the steps of both sides.

    Returns:
        The estimate for the step in which it is greatest, as a share (>= 0) of the losses; the last step has none
        behind it that could show its rate. 0 where a rate or a norm is missing.
    """
    apart, most = 0.0, 0.0
    losses = [abs(one.loss) for pair in pairs for one in pair if one.loss is not None]
    for a, b in pairs[:-1]:
        if a.skipped:
            continue
        if not a.lr or not b.lr or len(a.lr) != len(b.lr) or a.grad_norm is None:
            return 0.0
        least = min((y - x for x, y in zip(a.lr, b.lr, strict=True)), key=abs)
        apart += least * min(_LIMIT * a.grad_norm, a.grad_norm**2)
        most = max(most, abs(apart))
    return most / max([LEAST_LOSS, *losses])


def step_lengths(reference: Trace, pairs: Pairs) -> list[float] | None:
    """Return how long each step of the reference is, as a share of what training moves its weights in all.

    Where it isn't known where the first step began, it is taken for as long as the longest, or for less where its rate
    says so: at a rate of 0 it has no length.

    Returns:
        One number (>= 0) for each pair; None without sketches.
    """
    sketches = [a.weights.sketch for a, _ in pairs if a.weights is not None and a.weights.sketch]
    if len(sketches) < max(2, len(pairs)) or len({len(it) for it in sketches}) > 1:
        return None
    steps = [math.dist(before, after) for before, after in pairwise(sketches)]
    start, moved = reference.header.start, math.dist(sketches[0], sketches[-1])
    known = start is not None and pairs[0][0].step == 1 and len(start.sketch) == len(sketches[0])
    first = math.dist(start.sketch, sketches[0]) if start is not None and known else _by_rate(pairs, steps)
    return [it / moved for it in (first, *steps)] if moved > 0 else None


def _by_rate(pairs: Pairs, later: Sequence[float]) -> float:
    """How long the first step is by its learning rate at most, from the lengths of the later ones."""
    of_first, *rates = [max(a.lr) if a.lr else math.nan for a, _ in pairs]
    lengths = [length * of_first / rate for length, rate in zip(later, rates, strict=True) if rate > 0]
    return min(max(later), max(lengths)) if lengths and not math.isnan(of_first) else max(later)


def _share(name: str, pair: tuple[StepRecord, StepRecord]) -> float:
    """By what share (0 to 1) the update of a step would be off."""
    if name == "metrics":
        mine, theirs = (one.metrics for one in pair)
        numbers = [(mine[it], theirs[it]) for it in mine.keys() & theirs.keys()]
    else:
        reference, candidate = (_numbers(getattr(one, name)) for one in pair)
        if len(reference) != len(candidate):
            return 1.0  # what one side did not write may be anything
        numbers = list(zip(reference, candidate, strict=True))
    if any(math.isnan(x) != math.isnan(y) for x, y in numbers):
        return 1.0
    shares = [abs(y - x) / abs(x) if x else float(y != x) for x, y in numbers]
    return max((min(1.0, it) for it in shares if not math.isnan(it)), default=0.0)


def _numbers(value: object) -> tuple[float, ...]:
    if isinstance(value, tuple):
        return value
    return (float(value),) if isinstance(value, (int, float)) else ()
