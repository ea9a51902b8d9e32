"""All rules, and what is said where none of them fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ds_parity.parity.comparison.fields import Comparison, plain
from ds_parity.parity.diagnosis import (
    computed,
    data,
    gradient,
    learning_rate,
    reporting,
    term_factors,
    trainers_division,
    updates,
    windows,
)
from ds_parity.parity.diagnosis.alike import not_excluded
from ds_parity.parity.diagnosis.causes import CLASSES, Cause
from ds_parity.parity.diagnosis.certain import certain
from ds_parity.parity.diagnosis.classes import possible
from ds_parity.parity.diagnosis.finding import NOTHING, Diagnosis
from ds_parity.parity.diagnosis.next_step import recording, telling
from ds_parity.parity.diagnosis.no_reason import NO_REASONS, NoReason
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import Trace
from ds_parity.trace.columns import TraceFile, columns_of

_ROOMS = (computed, trainers_division, learning_rate, gradient, data, term_factors, updates, reporting)
_BEFORE, _LOOKED_AT = 250, 1000  # steps
_WHOLE = 1e-9


def diagnose(reference: Trace | TraceFile, candidate: Trace | TraceFile, comparison: Comparison) -> Diagnosis:
    """Return what is known of a difference: causes from which the record follows, or else what is certain.

    A cause is named only where it predicts what was recorded. Where windows contain other rollouts, everything behind
    them differs too, and only that is explained. Of files only a stretch of steps is looked at, from a little before
    the first difference on.

    Args:
        reference: the trace that is right.
        candidate: the trace in question.
        comparison: what `compare` found between them.

    Returns:
        An empty diagnosis where the traces are equal.
    """
    if comparison.equal:
        return NOTHING
    view, said = _looked_at(reference, candidate, comparison)
    if not view.pairs:
        return NOTHING
    of_one_side = dict.fromkeys(plain(it.name) for it in comparison.found if it.of_both is None)
    # A loss that is not logged has a name of its own.
    if "loss" not in of_one_side and all(it.of_both is None for it in comparison.found):
        # What both sides have is equal: one of them tells less than the other.
        next_step = recording(of_one_side)
        return Diagnosis(causes=(), certain=certain(view), classes=("logging",), not_excluded=(), next=next_step)
    causes, left_open = _causes(view), possible(view)
    named = {cause.name for cause in causes}
    # What is named is not excluded.
    classes = tuple(it for it in CLASSES if it in {*left_open, *(cause.kind for cause in causes)})
    return Diagnosis(
        causes=causes,
        certain=(*certain(view), *said),
        classes=classes,
        not_excluded=() if causes else tuple(name for name in not_excluded(view) if name not in named),
        next="" if causes else telling(view, classes),
    )


def _looked_at(
    reference: Trace | TraceFile, candidate: Trace | TraceFile, comparison: Comparison
) -> tuple[View, tuple[str, ...]]:
    """What the rules look at, without differences that are no reason, and what is said of these.

    All of both traces was compared, of which files show a stretch: so no comparison is made anew.
    """
    begin = _begins(reference), _begins(candidate)

    def view_of(kept: Comparison, taken: Sequence[NoReason]) -> View | None:
        stretch = _stretch(kept, begin)
        sides: tuple[Trace, Trace] | None = _seen(reference, stretch), _seen(candidate, stretch)
        left = comparison
        for one in taken:
            sides = one.taken_away(View(*sides, left, begin)) if sides is not None else None
            left = one.without(left)
        return None if sides is None else View(*sides, kept, begin)

    taken: tuple[NoReason, ...] = ()
    said: list[str] = []
    view = view_of(comparison, taken)
    assert view is not None, "nothing is taken away"
    for one in NO_REASONS:
        kept = one.without(view.comparison)
        if kept.found and kept.found != view.comparison.found:
            without = view_of(kept, (*taken, one))
            if without is not None:
                said.insert(0, one.said(view.comparison))
                view, taken = without, (*taken, one)
    return view, tuple(said)


def _causes(view: View) -> tuple[Cause, ...]:
    """The causes that fit, the likeliest first; of one name the likeliest."""
    rooms = (windows, reporting) if not view.same_windows else _ROOMS
    best: dict[str, Cause] = {}
    for cause in chain.from_iterable(room.causes(view) for room in rooms):
        if cause.name not in best or cause.likelihood > best[cause.name].likelihood:
            best[cause.name] = cause
    return tuple(sorted(best.values(), key=lambda cause: -cause.likelihood))


def _begins(trace: Trace | TraceFile) -> int:
    """The number of a trace's first step; 1 of one without any."""
    return next((of_some.steps[0] for of_some in columns_of(trace) if len(of_some.steps)), 1)


def _stretch(comparison: Comparison, begin: tuple[int, int]) -> tuple[int, int]:
    """The numbers of the first and the last step of files that the rules look at: as many as matter."""
    start = comparison.rows[0].step if comparison.rows else 1
    if comparison.steps > _LOOKED_AT:
        # What one side has in front of the other's first step is of one side alone.
        common = max(begin)
        steps = [it.first.step for it in comparison.found if it.first.step is not None]
        differs = min((step for step in steps if step >= common), default=common)
        start = max(common, differs - _BEFORE)
    return start, start + _LOOKED_AT - 1


def _seen(trace: Trace | TraceFile, stretch: tuple[int, int]) -> Trace:
    """The steps that the rules look at: all of a trace in memory, and as many as matter of a file."""
    return trace if isinstance(trace, Trace) else trace.excerpt(*stretch)
