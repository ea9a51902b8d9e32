"""Differences that are no reason for anything else that differs, so that the rules look at both sides without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ds_parity.parity.comparison.fields import NAMES, Comparison, plain, value_of
from ds_parity.parity.diagnosis.certain import other_split
from ds_parity.parity.diagnosis.effects import SPLIT
from ds_parity.parity.diagnosis.learning_rate import without_rounding_of_rates
from ds_parity.parity.diagnosis.nearness import near
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import StepRecord, Trace

_WHOLE = 1e-9


@dataclass(frozen=True)
class NoReason:
    """Differences that may be no reason for anything else that differs.

    Attributes:
        without: returns what was found without them.
        taken_away: returns both sides without them; None where they may be a reason.
        said: returns what is certain of them, in a sentence.
    """

    without: Callable[[Comparison], Comparison]
    taken_away: Callable[[View], tuple[Trace, Trace] | None]
    said: Callable[[Comparison], str]


def _of_both(comparison: Comparison) -> Comparison:
    found = tuple(kept for it in comparison.found if (kept := it.without_those_of_one_side) is not None)
    of_one_side = {it.name for it in comparison.found if it.of_one_side}
    return replace(
        comparison,
        differences=tuple(
            it
            for it in comparison.differences
            if it.field not in of_one_side or (it.reference is None) == (it.candidate is None)
        ),
        found=found,
    )


def _with_values_of_both(view: View) -> tuple[Trace, Trace]:
    """A trainer may log a value in some steps alone, and a trace of ds_parity may lack one: training is as it was."""
    pairs = [_with_what_both_have(*pair) for pair in view.pairs]
    sides = []
    for side, trace in enumerate((view.reference, view.candidate)):
        due = {pair[side].step: pair[side] for pair in pairs}
        sides.append(replace(trace, steps=tuple(due.get(it.step, it) for it in trace.steps)))
    return sides[0], sides[1]


def _with_what_both_have(a: StepRecord, b: StepRecord) -> tuple[StepRecord, StepRecord]:
    names = [name for name in NAMES if name != "metrics" and (value_of(a, name) is None) != (value_of(b, name) is None)]
    update: dict[str, Any] = dict.fromkeys(names)
    both = a.metrics.keys() & b.metrics.keys()
    if not update and a.metrics.keys() == b.metrics.keys():
        return a, b
    of_a, of_b = ({name: value for name, value in one.metrics.items() if name in both} for one in (a, b))
    return a.model_copy(update={**update, "metrics": of_a}), b.model_copy(update={**update, "metrics": of_b})


def _of_one_side(comparison: Comparison) -> str:
    steps: dict[str, int] = {}
    for it in comparison.found:
        if it.of_one_side:
            steps[plain(it.name)] = max(it.of_one_side, steps.get(plain(it.name), 0))
    told = ", ".join(f"{name} in {count} step{'s' * (count > 1)}" for name, count in steps.items())
    return f"one side alone has {told}, which is taken for no reason of what differs"


def _with_passes_alike(view: View) -> tuple[Trace, Trace] | None:
    """Micro-batches of another size make other passes of the same windows, which may be divided by them."""
    fields = {plain(it.name) for it in view.comparison.found}
    if fields & {"step", "rollouts"} or not view.recorded("rollouts") or ("total" in fields and _counts_passes(view)):
        return None
    passes = {b.step: {name: getattr(b, name) for name in SPLIT} for _, b in view.pairs}
    steps = [it.model_copy(update=passes.get(it.step, {})) for it in view.reference.steps]
    return replace(view.reference, steps=tuple(steps)), view.candidate


def _with_rates_alike(view: View) -> tuple[Trace, Trace] | None:
    """One side may have written its rates as numbers of fp32, all of them, also those that no stretch shows."""
    rates = without_rounding_of_rates(view) if view.pairs and view.rates_agree_to_fp32 else None
    return None if rates is None else (view.reference, rates)


def _without(fields: set[str], comparison: Comparison) -> Comparison:
    return replace(
        comparison,
        differences=tuple(it for it in comparison.differences if plain(it.field) not in fields),
        found=tuple(it for it in comparison.found if plain(it.name) not in fields),
    )


def _counts_passes(view: View) -> bool:
    """Whether the denominator of each window is how many micro-batches it has, as with the weight `pass`."""
    headers = view.reference.header, view.candidate.header
    known = [
        (one.total, one.passes, one.idle_passes or 0, header.ranks)
        for pair in view.pairs
        for one, header in zip(pair, headers, strict=True)
        if one.total is not None and math.isfinite(one.total) and one.passes
    ]
    if not known:
        return False
    # Of unknown ranks it is one whole number of times, of which some may have been idle.
    total, passes, idle, _ = known[0]
    times = max(1, round((total + idle) / passes))
    return all(near(total, passes * (ranks or times) - idle, _WHOLE) for total, passes, idle, ranks in known)


NO_REASONS = (
    NoReason(_of_both, _with_values_of_both, _of_one_side),
    NoReason(partial(_without, SPLIT), _with_passes_alike, other_split),
    NoReason(
        partial(_without, {"lr"}),
        _with_rates_alike,
        lambda _: "the learning rates agree to fp32, and are taken for equal",
    ),
)
