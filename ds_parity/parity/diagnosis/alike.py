"""Known faults that the record does not exclude, though it does not show them either."""

from __future__ import annotations

from ds_parity.parity.diagnosis.computed import undecided
from ds_parity.parity.diagnosis.gradient import not_finite, parallel
from ds_parity.parity.diagnosis.view import View

_MIXED = (
    "mean-of-micro-batches",
    "half-broadcast",
    "running-total",
    "aux-term-scaled-apart",
    "last-backward-only",
    "last-backward-by-caller",
    "late-boundary",
)
_MIXED_LATER = ("sticky-boundary", "mid-window-checkpoint")
_WIDE = 1e-3
_OF_LOSS = ("mixed-weights", "unmasked-numerator", "global-metadata")
_OF_UPDATE = ("clip-at-wrong-scale", "implicit-clip")


def not_excluded(view: View) -> tuple[str, ...]:
    """Return the known faults that leave such a record, and no number of their own in it.

    They take other shares of the micro-batches of a window, or other losses of their rows, which a trace does not hold.
    Where the reference has computed them, those are left out that would have left other figures.
    """
    may_be, excluded = undecided(view)
    return tuple(dict.fromkeys((*may_be, *(name for name in _of_fields(view) if name not in excluded))))


def _of_fields(view: View) -> tuple[str, ...]:
    at, first = view.at_first, view.first
    if view.trained_alike or at & {"lr", "rollouts", "step"} or first == len(view.pairs):
        return ()
    if "skipped" in at or not_finite(view):
        return ("idle-nan", "zero-denominator")
    if "loss" in at and "total" not in at:
        return _losses(view) if first == 0 and not at & {"tokens", "metrics"} else ()
    if "grad_norm" in at and "loss" not in at and parallel(view) is not True:
        # Where bounds are wide, the steps before may be off too.
        wide = view.comparison.bound("grad_norm", 1) > _WIDE
        return _MIXED if first == 0 else (*_MIXED_LATER, *_MIXED, *_OF_UPDATE) if wide else _MIXED_LATER
    if at == {"weights"}:
        return (*_OF_UPDATE, "resume-loses-optimizer") if first else _OF_UPDATE
    return ()


def _losses(view: View) -> tuple[str, ...]:
    return (*_OF_LOSS, "shared-padding") if any(view.idle) else _OF_LOSS
