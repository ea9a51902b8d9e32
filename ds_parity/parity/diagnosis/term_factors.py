"""A loss of several terms, each with a denominator of its own: one of them was divided by something else.

A trace has the loss and, among the metrics, each term's own mean. The coefficients of the terms follow from the steps
of the reference; with them each step of the candidate says by what factor one term entered its loss. A cause is named
only where that factor is a ratio of counts in every step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.nearness import alike, near
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import StepRecord

# Losses and means are of fp32 numbers that were summed in fp64; what is left out is 1e-7 of them.
_FITS = 1e-4
_COUNTS = 0.005
# A term that hardly enters the loss has no factor that can be told from rounding.
_LEAST = 1e-3


def causes(view: View) -> Iterator[Cause]:
    """Yield what would divide one term by another number, where loss and gradient differ and the terms' means agree."""
    if "loss" not in view.at_first or not view.at_first & {"grad_norm", "weights"}:
        return
    if view.at_first & {"lr", "metrics", "rollouts", "tokens", "total"}:
        return
    coefficients = _coefficients([a for a, _ in view.pairs])
    for name in coefficients:
        factors = _factors([b for _, b in view.pairs], coefficients, name)
        if factors is not None and not near(factors[view.first], 1.0, _COUNTS):
            yield from _of_one(view, name, factors)


def _coefficients(steps: list[StepRecord]) -> dict[str, float]:
    """Return the coefficients by which metrics add up to the loss in every step; none where they do not."""
    full = [one for one in steps if one.loss is not None and one.metrics]
    names = sorted(set.intersection(*(set(one.metrics) for one in full))) if full else []
    if not names or len(full) <= len(names):
        return {}
    means = np.array([[one.metrics[name] for name in names] for one in full], dtype=float)
    losses = np.array([one.loss for one in full], dtype=float)
    if not (np.isfinite(means).all() and np.isfinite(losses).all() and losses.any()):
        return {}
    solution, _, rank, _ = np.linalg.lstsq(means, losses, rcond=None)
    size = float(np.abs(losses).max())
    if rank < len(names) or not float(np.abs(means @ solution - losses).max()) <= _FITS * size:
        return {}
    entering = np.abs(means * solution).max(axis=0) > _LEAST * size
    found = {name: float(c) for name, c, there in zip(names, solution, entering, strict=True) if there}
    return found if len(found) > 1 else {}


def _factors(steps: list[StepRecord], coefficients: dict[str, float], name: str) -> list[float] | None:
    """Return by what factor a term entered the loss of each step, if all others entered it as they should."""
    factors = []
    for one in steps:
        if one.loss is None or not coefficients.keys() <= one.metrics.keys():
            return None
        parts = {other: c * one.metrics[other] for other, c in coefficients.items()}
        if not abs(parts[name]) > _LEAST * abs(one.loss):
            return None
        factors.append(1 + (one.loss - sum(parts.values())) / parts[name])
    return factors


def _of_one(view: View, name: str, factors: list[float]) -> Iterator[Cause]:
    counts = _counts(view)
    listed = ", ".join(f"{factor:.4g}" for factor in factors[:4])
    said = f"the means of all terms agree, and {name} enters the loss {listed} times"
    for own, of_own in counts.items():
        for other, of_other in counts.items():
            fits = [near(f, a / b, _COUNTS) for f, a, b in zip(factors, of_own, of_other, strict=True)]
            if own != other and all(fits):
                ratio = f"{said}: as often as a step has {own} for each of its {other}"
                # The same number in all steps may as well be a coefficient.
                varies = not alike(factors, _COUNTS)
                if varies:
                    yield Cause("term-by-another", Fit.EVERY_STEP, ratio)
                else:
                    yield Cause("term-by-another", Fit.CONSTANT, f"{ratio}, or by its coefficient")
        before = [1.0] * view.first + [
            of_own[at] / of_own[at - 1] for at in range(max(view.first, 1), len(factors)) if of_own[at - 1]
        ]
        if view.first and all(near(f, b, _COUNTS) for f, b in zip(factors, before, strict=False)):
            yield Cause(
                "term-of-last-window", Fit.EVERY_STEP, f"{said}: the {own} of each step for those of the step before"
            )


def _counts(view: View) -> dict[str, list[float]]:
    """Return what each step contains, by the units that terms are means over; only what every step has."""
    counts = {
        "tokens": [one.tokens or 0 for one, _ in view.pairs],
        "rollouts": [one.rollouts or 0 for one, _ in view.pairs],
        "prompts": [one.prompts or 0 for one, _ in view.pairs],
        "micro-batches": [n * view.ranks - idle for n, idle in zip(view.passes, view.idle, strict=True)],
    }
    return {name: [float(n) for n in numbers] for name, numbers in counts.items() if all(n > 0 for n in numbers)}
