"""By which factors updates are off that have the reference's direction, and by which a cause would have them off."""

from __future__ import annotations

import numpy as np

from ds_parity.parity.diagnosis.moves import ABOUT, Moves, along
from ds_parity.parity.diagnosis.view import View

_ALIGNED, _ANOTHER = 0.03, 0.15
_CLOSE = 0.1  # of what a factor changes


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
        if not rest < (_ALIGNED if at == view.first else ABOUT):
            return []
        factors.append(1 + share)
    return factors


def multiple(view: View, moves: Moves) -> bool | None:
    """Whether the first update that differs is a positive multiple of the reference's, as with another LR.

    None where the updates are not known or nothing, or where rounding has a say in their direction.
    """
    update = moves.update(view.first) if moves.known else None
    if update is None or not update.any() or not moves.clear(view.first):
        return None
    (share,), rest = along(moves.widened(view.first), [update])
    return rest < _ANOTHER and share > -1


def entered(view: View, moves: Moves) -> float | None:
    """How many times the gradient entered the first update that differs; NaN: in another direction, None: not known.

    An update is a sum of the gradient and of what momentum and the decay of weights mix into it. Of other optimizers
    than SGD, which do not add gradients up, only multiples of the whole update are known, with decay beside it.
    """
    at = view.first
    update, before = (moves.update(it) if moves.known and it >= 0 else None for it in (at, at - 1))
    if update is None or not moves.clear(at) or (moves.linear and at > 0 and before is None):
        return None
    mixed = [before, *moves.carried(at)] if moves.linear else [moves.reference(max(0, at - 1))]
    shares, rest = along(moves.widened(at), [update, *(it for it in mixed if it is not None)])
    if rest < _ALIGNED:
        return 1 + shares[0]
    return float("nan") if moves.linear and rest > _ANOTHER else None


def may_be_opposite(view: View, moves: Moves) -> bool:
    """Whether the gradient entered the first update that differs with another sign, or all updates have it.

    So it may have where neither that update is known nor a factor of later ones.
    """
    if not moves.known:
        return False
    times = entered(view, moves)
    if times is not None and times < 0:
        return True
    factors = factors_of(view, moves, first_known(view, moves))
    return all(it < 0 for it in factors) if factors else moves.update(view.first) is None


def fits(factors: list[float], expected: list[float]) -> bool:
    """Whether updates are off by the expected factors, to a tenth of what these change."""
    return (
        len(factors) > 1
        and len(expected) == len(factors)
        and all(abs(f - p) <= _CLOSE * abs(p - 1) for f, p in zip(factors, expected, strict=True))
    )


def shows_rates_used(view: View, moves: Moves) -> bool:
    """Whether every update is as long as another rate has it than the logged one: that of the step before.

    The first one that differs starts from the same weights, and shows it closely. Behind it the weights are others, and
    so are the gradients by about: what the rates change is known where it is more than that, in one of them at least.
    A rate of 0, with which warm-up begins, then leaves a step without an update.
    """
    first = view.first
    rates = [pair[0].lr[0] if pair[0].lr else 0.0 for pair in view.pairs]
    update = moves.update(first)
    if first < 1 or len(rates) < first + 2 or not all(rates[first:]) or update is None:
        return False
    expected = [before / rate for before, rate in zip(rates[first - 1 :], rates[first:], strict=False)]
    (share,), rest = along(moves.widened(first), [update])
    if rest > _ALIGNED or abs(1 + share - expected[0]) > _CLOSE * abs(expected[0] - 1):
        return False
    telling = 0
    for at, due in enumerate(expected[1:], start=first + 1):
        update = moves.update(at)
        assert update is not None
        (times,), rest = along(update + moves.widened(at), [update])
        if rest > ABOUT or abs(times - due) > ABOUT * due:
            return False
        telling += abs(due - 1) > ABOUT * max(1.0, due)
    return telling > 0


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
