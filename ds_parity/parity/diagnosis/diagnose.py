"""All rules, and the order in which their causes are shown."""

from __future__ import annotations

from itertools import chain

from ds_parity.parity.diagnosis import gradient, reporting, schedule, windows
from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.view import View
from ds_parity.parity.fields import Comparison
from ds_parity.trace import Trace

_ROOMS = (windows, schedule, gradient, reporting)


def diagnose(reference: Trace, candidate: Trace, comparison: Comparison) -> tuple[Cause, ...]:
    """Return what would explain the difference, the likeliest first; none where the traces are equal.

    Where windows hold other rollouts, everything behind them differs too, and only that is explained.

    Args:
        reference: the trace that is right.
        candidate: the trace in question.
        comparison: what `compare` found between them.
    """
    view = View(reference, candidate, comparison)
    if comparison.equal or not view.pairs:
        return ()
    rooms = (windows,) if not view.same_windows else _ROOMS[1:]
    best: dict[str, Cause] = {}
    for cause in chain.from_iterable(room.causes(view) for room in rooms):
        if cause.name not in best or cause.likelihood > best[cause.name].likelihood:
            best[cause.name] = cause
    return tuple(sorted(best.values(), key=lambda cause: -cause.likelihood))
