"""The same training, logged in another way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.view import View, alike, near


def causes(view: View) -> Iterator[Cause]:
    """Yield what would change what is written down and nothing else."""
    if view.fields & {"grad_norm", "weights", "lr", "skipped"}:
        return
    if "loss" in view.fields:
        yield from _loss(view)
    if "metrics" in view.fields:
        yield from _metrics(view)


def _loss(view: View) -> Iterator[Cause]:
    ratios = [ratio for ratio in view.ratios("loss") if ratio is not None]
    if alike(ratios) and ratios[0] and near(1 / ratios[0], max(view.passes)):
        said = (
            f"the loss is {ratios[0]:.5g} times the reference's, weights and norms agree; "
            f"windows have {view.passes[0]} passes"
        )
        yield Cause("returned-loss-scaled", 0.9, said)
    elif alike(ratios):
        yield Cause(
            "returned-loss-scaled", 0.6, f"the loss is {ratios[0]:.5g} times the reference's, weights and norms agree"
        )
    else:
        yield Cause("metrics-mean-of-ranks", 0.8, "losses differ by no one factor, weights and norms agree")


def _metrics(view: View) -> Iterator[Cause]:
    for name in sorted({name for a, b in view.pairs for name in a.metrics.keys() & b.metrics.keys()}):
        values = [(a.metrics.get(name), b.metrics.get(name), a.rollouts or 0) for a, b in view.pairs]
        known = [(x, y, count) for x, y, count in values if x is not None and y is not None]
        if any(math.isnan(y) and not math.isnan(x) for x, y, _ in known):
            yield Cause(
                "nan-in-metric-reduce", 0.95, f"{name} is NaN where the reference has a number; all else agrees"
            )
            continue
        if all(x == y for x, y, _ in known):
            continue
        kept = _accumulates(known)
        listed = ", ".join(f"{y:.4g} for {x:.4g}" for x, y, _ in known[:4])
        yield Cause(
            "reset-gated-by-logging",
            0.9 if kept else 0.2,
            f"{name}: {listed}" + ("; it holds the step before too" if kept else ""),
        )
        yield Cause("accuracy-of-means", 0.7, f"{name}: {listed}; all else agrees")


def _accumulates(known: list[tuple[float, float, int]]) -> bool:
    """Whether a step that is off is the mean of it and the one before."""
    fits = []
    for (x, _, m), (y, value, n) in pairwise(known):
        if value != y and m + n:
            fits.append(near(value, (x * m + y * n) / (m + n), 1e-6))
    return bool(fits) and all(fits)
