"""All rules, and the order in which their causes are shown."""

from __future__ import annotations

from itertools import chain

from ds_parity.parity.comparison.fields import Comparison
from ds_parity.parity.diagnosis import gradient, learning_rate, reporting, term_factors, windows
from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import Trace
from ds_parity.trace.columns import TraceFile

_ROOMS = (windows, learning_rate, gradient, term_factors, reporting)
_BEFORE, _LOOKED_AT = 250, 1000  # steps


def diagnose(reference: Trace | TraceFile, candidate: Trace | TraceFile, comparison: Comparison) -> tuple[Cause, ...]:
    """Return what would explain the difference, the likeliest first; none where the traces are equal.

    Where windows hold other rollouts, everything behind them differs too, and only that is explained. Of files only a
    stretch of steps is looked at, from a little before the first difference on.

    Args:
        reference: the trace that is right.
        candidate: the trace in question.
        comparison: what `compare` found between them.
    """
    if comparison.equal:
        return ()
    view = View(_seen(reference, comparison), _seen(candidate, comparison), comparison)
    if not view.pairs:
        return ()
    rooms = (windows,) if not view.same_windows else _ROOMS[1:]
    best: dict[str, Cause] = {}
    for cause in chain.from_iterable(room.causes(view) for room in rooms):
        if cause.name not in best or cause.likelihood > best[cause.name].likelihood:
            best[cause.name] = cause
    return tuple(sorted(best.values(), key=lambda cause: -cause.likelihood))


def _seen(trace: Trace | TraceFile, comparison: Comparison) -> Trace:
    """The steps that the rules look at: all of a trace in memory, and as many as matter of a file."""
    if isinstance(trace, Trace):
        return trace
    assert comparison.first is not None
    start = comparison.rows[0].step if comparison.rows else 1
    if comparison.steps > _LOOKED_AT and comparison.first.step is not None:
        start = max(start, comparison.first.step - _BEFORE)
    return trace.excerpt(start, start + _LOOKED_AT - 1)
