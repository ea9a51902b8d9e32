"""A trainer that divides its loss itself, beside an engine that knows what the trainer would have made of it."""

from __future__ import annotations

from collections.abc import Iterator

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.nearness import near
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace.records import DIVIDED_BY_TRAINER

_CLEAR = 10.0
_ROUNDED = 1e-6  # where figures are compared bit for bit, the other run's sum is in another order all the same
_LEAST = 0.05  # of a loss, whose parts may cancel


def causes(view: View) -> Iterator[Cause]:
    """Yield that the candidate's loss is what the trainer's own division makes of the reference's micro-batches.

    Up to the first step that differs both runs have the same weights, so its loss is known to rounding. Later steps
    begin from other weights.
    """
    if view.first == len(view.pairs) or "loss" not in view.at_first or view.trained_alike:
        return
    a, b = view.pairs[view.first]
    it = (a.hypotheses or {}).get(DIVIDED_BY_TRAINER)
    if it is None or it.loss is None or a.loss is None or b.loss is None:
        return
    bound = max(view.comparison.bound("loss", a.rollouts or 1), _ROUNDED)
    clear = abs(it.loss - a.loss) > _CLEAR * bound * max(abs(a.loss), _LEAST)
    if clear and (near(b.loss, it.loss, bound) or abs(b.loss - it.loss) <= bound * _LEAST):
        said = (
            f"step {view.step(view.first)} has the loss that the trainer's own division makes of it: {b.loss:.7g} "
            f"(predicted {it.loss:.7g}, by the step's own total {a.loss:.7g})"
        )
        yield Cause("divided-by-trainer", Fit.COMPUTED, said)
