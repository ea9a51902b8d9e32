"""Known faults that leave such a record, though it does not show them.

Each list begins with the faults that change the field which differs first. Those are left out that the step in which it
does contradicts: both sides come to that step with the same weights, so it has the fault's own figures. Later steps
contradict nothing, because other weights have other gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_parity.parity.diagnosis.computed import undecided
from ds_parity.parity.diagnosis.gradient import lengths, not_finite, parallel
from ds_parity.parity.diagnosis.lengths import linear
from ds_parity.parity.diagnosis.moves import Moves, along
from ds_parity.parity.diagnosis.nearness import near
from ds_parity.parity.diagnosis.update_factors import entered, multiple
from ds_parity.parity.diagnosis.view import View

_OF_SEVERAL_RANKS = {"half-broadcast", "late-boundary", "rank-left-out"}
_OF_SEVERAL_PASSES = {
    "running-total", "last-backward-only", "last-backward-by-caller", "first-passes-lost", "last-pass-lost",
    "sticky-boundary", "mid-window-checkpoint",
}  # fmt: skip
_MIXED = (
    "mean-of-micro-batches", "weighed-by-another-unit", "half-broadcast", "running-total", "aux-term-scaled-apart",
    "last-backward-only", "last-backward-by-caller", "late-boundary", "first-passes-lost", "last-pass-lost",
    "rank-left-out",
)  # fmt: skip
_MIXED_LATER = ("sticky-boundary", "mid-window-checkpoint")
_OF_LOSS = ("mixed-weights", "unmasked-numerator", "mask-left-out", "advantages-left-out", "global-metadata")
_CLIPPING = ("clip-at-wrong-scale", "implicit-clip", "clipping-left-out")
_WIDE = 1e-3
_ANOTHER = 0.15
_AS_IT_IS = 0.02


def not_excluded(view: View) -> tuple[str, ...]:
    """Return known faults that leave such a record, and no number of their own in it.

    They take other shares of the micro-batches of a window, or other losses of their rows, which a trace does not hold;
    or later steps are too far off for a number to be seen. Where the reference has computed them, those are left out
    that would have left other figures.
    """
    may_be, excluded = undecided(view)
    return tuple(dict.fromkeys((*may_be, *(name for name in _of_fields(view) if name not in excluded))))


def _of_fields(view: View) -> Iterator[str]:
    at, first = view.at_first, view.first
    if view.trained_alike or at & {"lr", "rollouts", "step"} or first == len(view.pairs):
        return
    if "skipped" in at or not_finite(view):
        yield from ("idle-nan", "zero-denominator")
    elif "loss" in at and "total" not in at:
        yield from _of_loss(view)
    elif "grad_norm" in at and "loss" not in at:
        yield from _of_gradient(view)
    elif at == {"weights"}:
        yield from _of_update(view)
        if not view.recorded("grad_norm") or (view.loose and Moves(view).turned(first)):
            yield from _of_gradient(view)
        if view.loose:
            yield from _of_loss(view)
    if view.unseen and at & {"loss", "grad_norm"}:
        yield from _of_update(view)
    if view.steps_left_out and at & {"loss", "grad_norm", "weights"}:
        # A step that is in neither record may differ in anything.
        yield from (*_OF_LOSS, *_of_gradient(view))


def _of_loss(view: View) -> Iterator[str]:
    if view.first == 0 and not view.at_first & {"tokens", "metrics"}:
        yield from _OF_LOSS
        if any(view.idle):
            yield "shared-padding"


def _of_gradient(view: View) -> Iterator[str]:
    """The length of the whole gradient, unless it has another direction; shares of micro-batches, unless it has not."""
    direction = parallel(view)
    if direction is not True:
        several_ranks = not all(side.header.ranks == 1 for side in (view.reference, view.candidate))
        several_passes = view.passes[view.first] != 1
        for name in _of_shares(view):
            if (several_ranks or name not in _OF_SEVERAL_RANKS) and (several_passes or name not in _OF_SEVERAL_PASSES):
                yield name
    if direction is not False:
        yield from lengths(view)


def _of_shares(view: View) -> Iterator[str]:
    # Where bounds are wide, the steps before may be off too.
    wide = view.comparison.bound("grad_norm", 1) > _WIDE
    if view.first == 1:
        yield "gradient-not-zeroed"
    if view.first:
        yield from _MIXED_LATER
    if wide or not view.first:
        yield from _MIXED
    if wide and view.first:
        yield from _CLIPPING


def _of_update(view: View) -> Iterator[str]:
    moves, later = Moves(view), view.first > 0 or view.is_excerpt
    times, longer = entered(view, moves), multiple(view, moves)
    if times is None or (times > 0 and not near(times, 1.0, _AS_IT_IS)):
        yield from _CLIPPING
    yield from _of_decay(view, moves)
    if times is None or times > 0:  # what momentum adds leaves the gradient's direction as it is
        yield from (["momentum"] if view.first <= 1 else []) + (["resume-loses-optimizer"] if later else [])
    if longer is False or moves.turned(view.first):
        return
    yield "lr-in-use"
    if not linear(view.reference.header, view.candidate.header):
        yield from (["adam-step-count"] if later else []) + ([] if view.first else ["adam-without-bias-correction"])
    if longer is None:
        yield "update-lost"


def _of_decay(view: View, moves: Moves) -> Iterator[str]:
    """Both scale weights; decay that enters the gradient leaves no such direction where an optimizer divides it."""
    scaled, at = True, view.first
    if moves.known and moves.clear(at):
        update = moves.update(at)
        before = moves.reference(at) - update if update is not None else moves.reference(max(0, at - 1))
        scaled = along(moves.widened(at), [before])[1] < _ANOTHER
    if scaled or not moves.linear:
        yield "weight-decay"
    if scaled:
        yield "weights-scaled-by-hand"
