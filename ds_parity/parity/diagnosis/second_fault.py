"""A wrong logged rate and another fault behind it: what the steps show in which the rate alone differs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ds_parity.parity.comparison.bounds import EPS
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis.view import View, plain
from ds_parity.trace import StepRecord, Trace

# Of what rates do: gradients of other rows have another direction, and show a hundredth of it.
_OF_OTHER_ROWS = 0.01
_WORDS = {"loss": "loss", "grad_norm": "gradient norm"}


def before_another(view: View) -> View | None:
    """Return the steps in front of the first one in which more than the learning rate differs.

    Args:
        view: two traces side by side.

    Returns:
        None where nothing else differs, or where something does as soon as the rate.
    """
    steps = [it.first.step for it in view.comparison.found if plain(it.name) != "lr"]
    other = min((step for step in steps if step is not None), default=None)
    if other is None or "lr" not in view.at_first or other <= view.step(view.first):
        return None
    reference, candidate = (
        replace(trace, steps=tuple(step for step in trace.steps if step.step < other))
        for trace in (view.reference, view.candidate)
    )
    comparison = compare(reference, candidate, view.comparison.tier, view.comparison.dtype)
    return View(reference, candidate, comparison, view.begin)


def proves(view: View) -> bool:
    """Return whether the record proves that the learning rates were the same, of whichever step those are that it says.

    A loop may log the rate that its scheduler has set for the next step. So the last rate of a record alone proves
    nothing, nor does one that the step behind it would have used, which was skipped.

    Args:
        view: two traces side by side.
    """
    if not view.updated_alike:
        return False
    reference, candidate = (_a_step_later(trace, view) for trace in (view.reference, view.candidate))
    comparison = compare(reference, candidate, view.comparison.tier, view.comparison.dtype)
    later = View(reference, candidate, comparison, view.begin)
    return "lr" in later.fields and later.updated_alike


def _a_step_later(trace: Trace, view: View) -> Trace:
    """A trace in which each step has the rate that the step before it logs, and the first one the reference's own."""
    side, pairs = int(trace is view.candidate), view.pairs
    rates = {pairs[0][0].step: pairs[0][0].lr}
    rates |= {b.step: before[side].lr for before, (_, b) in pairwise(pairs)}
    return replace(trace, steps=tuple(it.model_copy(update={"lr": rates.get(it.step)}) for it in trace.steps))


def too_sudden(view: View, alone: View) -> str:
    """Return that a loss or a norm parts at once, where other rates would have taken it apart from step to step.

    Weights part in proportion to the rates that were off so far, and losses and norms with them, give or take the
    direction of the next gradient. What hardly lies apart behind many rates is not far apart because of one more.

    Args:
        view: two traces side by side.
        alone: their steps in which the learning rate alone differs.

    Returns:
        A sentence; "" where rates that were trained with may have done it.
    """
    at = len(alone.pairs)
    if at >= len(view.pairs):
        return ""
    off = [0.0 if a.skipped else _off(a, b) for a, b in view.pairs[:at]]
    # The last of these steps shows the rates of those before, and the next step its own, too; unless the log is of the
    # rates that the schedulers had set for the next step.
    readings = [(abs(sum(used[:-1])), sum(map(abs, used))) for used in (off, off[:-1])]
    for name, words in _WORDS.items():
        held = [_apart(view, name, pair) for pair in view.pairs[view.first + 1 : at + 1]]
        known = [it for it in held if it is not None]
        if len(known) == len(held) > 1:
            *before, last = known
            if all(shown and _OF_OTHER_ROWS * last * shown > max(before) * then for shown, then in readings):
                return f"in step {view.step(at)} its {words} parts at once, which other rates had not moved before"
    return ""


def _off(a: StepRecord, b: StepRecord) -> float:
    """By how much the rate of a step is off; of several parameter groups, the one whose rate is off least."""
    return min((y - x for x, y in zip(a.lr or (), b.lr or (), strict=False)), key=abs, default=0.0)


def _apart(view: View, name: str, pair: tuple[StepRecord, StepRecord]) -> float | None:
    """How far a field of a step may lie apart: what was written hides what is less than its last digit."""
    known = [float(value) for one in pair if (value := getattr(one, name)) is not None]
    if len(known) < len(pair):
        return None
    written = (trace.precision.get(name) for trace in (view.reference, view.candidate))
    hidden = sum(how.slack(value) for how, value in zip(written, known, strict=True) if how is not None)
    return max(abs(known[1] - known[0]), hidden, EPS[view.comparison.dtype] * max(map(abs, known)))
