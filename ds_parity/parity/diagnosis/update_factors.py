"""By which factors updates are off that have the reference's direction, and by which a cause would have them off."""

from __future__ import annotations

import numpy as np

from ds_parity.parity.diagnosis.moves import Moves, along
from ds_parity.parity.diagnosis.view import View

_ALIGNED = 0.03
_ABOUT = 0.25  # weights that differ have other gradients


def first_known(view: View, moves: Moves) -> int:
    """The first step that differs and whose update is known."""
    return view.first if moves.update(view.first) is not None else 1


def factors_of(view: View, moves: Moves, first: int) -> list[float]:
    """By which factors the updates are off, if all of them have the reference's direction; later ones by about."""
    factors = []
    for at in range(first, len(view.pairs)):
        update = moves.update(at)
        assert update is not None
        (share,), rest = along(moves.widened(at), [update])
        if not rest < (_ALIGNED if at == view.first else _ABOUT):
            return []
        factors.append(1 + share)
    return factors


def fits(factors: list[float], expected: list[float]) -> bool:
    """Whether updates are off by the expected factors, to a tenth of what these change."""
    return (
        len(factors) > 1
        and len(expected) == len(factors)
        and all(abs(f - p) <= 0.1 * abs(p - 1) for f, p in zip(factors, expected, strict=True))
    )


def predicted(view: View, first: int, count: int) -> dict[str, list[float]]:
    """Return the factors of the updates from the step `first` on, by cause; Adam's for its usual betas."""
    at = range(first, first + count)
    rates = [pair[0].lr[0] if pair[0].lr else 0.0 for pair in view.pairs]
    found: dict[str, list[float]] = {}
    if view.first == 0:
        found["adam-without-bias-correction"] = [1 / _corrected(it + 1) for it in at]
    if view.first > 0:
        # The count of steps begins anew, with the moments that there are.
        found["adam-step-count"] = [_corrected(it - first + 1) / _corrected(it + 1) for it in at]
    if all(rates) and first > 0 and len(set(rates)) > 1:
        found["lr-in-use"] = [rates[it - 1] / rates[it] for it in at]
    return found


def _corrected(step: int, betas: tuple[float, float] = (0.9, 0.999)) -> float:
    """By what Adam's correction of the biases multiplies an update of uncorrected moments."""
    return float(np.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step))
