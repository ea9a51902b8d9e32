"""All rules, and what is said where none of them fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.comparison.fields import Comparison
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
from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.certain import OTHER_SPLIT, certain
from ds_parity.parity.diagnosis.classes import possible
from ds_parity.parity.diagnosis.effects import SPLIT
from ds_parity.parity.diagnosis.finding import NOTHING, Diagnosis
from ds_parity.parity.diagnosis.learning_rate import without_rounding_of_rates
from ds_parity.parity.diagnosis.next_step import telling
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import Trace
from ds_parity.trace.columns import TraceFile, columns_of

_ROOMS = (computed, trainers_division, learning_rate, gradient, data, term_factors, updates, reporting)
_BEFORE, _LOOKED_AT = 250, 1000  # steps


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
    begin = _begins(reference), _begins(candidate)
    stretch = _stretch(comparison, begin)
    view = View(_seen(reference, stretch), _seen(candidate, stretch), comparison, begin)
    if not view.pairs:
        return NOTHING
    split = _split_alike(view)
    if split is not None:
        found = diagnose(split, view.candidate, compare(split, view.candidate, comparison.tier, comparison.dtype))
        return replace(found, certain=(*found.certain, OTHER_SPLIT))
    rates = without_rounding_of_rates(view)
    if rates is not None:
        # One side wrote its rates as numbers of fp32, which is no reason for anything else that differs.
        found = diagnose(view.reference, rates, compare(view.reference, rates, comparison.tier, comparison.dtype))
        return replace(found, certain=(*found.certain, "the learning rates agree to fp32, and are taken for equal"))
    causes, classes = _causes(view), possible(view)
    named = {cause.name for cause in causes}
    return Diagnosis(
        causes=causes,
        certain=certain(view),
        classes=classes,
        not_excluded=() if causes else tuple(name for name in not_excluded(view) if name not in named),
        next="" if causes else telling(view, classes),
    )


def _split_alike(view: View) -> Trace | None:
    """Return the reference with the candidate's passes, where windows of the same rollouts have others.

    Micro-batches of another size are no reason for anything else that differs.

    Returns:
        None where nothing else does, or windows are not known to be the same.
    """
    others = view.fields - SPLIT
    if not view.fields & SPLIT or not others or others & {"step", "rollouts", "total"} or not view.recorded("rollouts"):
        return None
    passes = {b.step: {name: getattr(b, name) for name in SPLIT} for _, b in view.pairs}
    steps = [it.model_copy(update=passes.get(it.step, {})) for it in view.reference.steps]
    return replace(view.reference, steps=tuple(steps))


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
