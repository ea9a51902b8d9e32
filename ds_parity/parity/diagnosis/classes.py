"""In which classes a fault can be, by what differs first: whatever comes before it in a step is then excluded.

A step goes from data to a loss, to a gradient, its clipping, an update with a learning rate, and to weights. Where all
steps before agree, weights included, the first field that differs says how far down the fault is at most, and fields
that agree say where it is not.
"""

from __future__ import annotations

import math

from ds_parity.parity.comparison.bounds import DRIFT, EPS
from ds_parity.parity.diagnosis.causes import CLASSES
from ds_parity.parity.diagnosis.effects import SPLIT
from ds_parity.parity.diagnosis.gradient import not_finite
from ds_parity.parity.diagnosis.moves import Moves
from ds_parity.parity.diagnosis.nearness import near
from ds_parity.parity.diagnosis.reporting import exact_factor
from ds_parity.parity.diagnosis.update_factors import entered, may_be_opposite, multiple
from ds_parity.parity.diagnosis.view import View

_OF_UPDATE = {"clipping", "optimizer settings", "schedule", "weights"}
# Of their bound, or of what a loss is off by: what lies further apart has not agreed, it was let pass.
_CREPT = 0.1
_SAME = 1e-3
_FIGURES = ("loss", "grad_norm", "weights")
# Times as far as a loss is off, or as its last digit: weights that differ by rounding move a norm by more than a loss,
# which is flat where training ends.
_HIDDEN = 1e3
_OF_WORDS = 0.3  # a cross-entropy of language is above it; a loss of a policy lies about 0, with a KL term above it


def possible(view: View) -> tuple[str, ...]:
    """Return the classes that the record leaves open, in the order of `CLASSES`."""
    if view.trained_alike:
        if view.fields <= SPLIT:
            return ("data", "logging")
        # A loss may have the same gradient and another value.
        # So may a term of it that a metric tells of, and that has a small coefficient.
        another = ("loss" in view.fields and not exact_factor(view)) or "metrics" in view.fields
        return ("loss", "logging") if another else ("logging",)
    at = _may_differ_at_first(view)
    found: set[str] = set()
    if at & {"rollouts", "step"}:
        found |= {"data", "gradient"}  # windows end where gradients stop to accumulate; all else follows
    elif "lr" in at:
        found |= _of_rate(view, at)
    elif at & {"skipped"} or not_finite(view):
        found |= {"gradient", "loss"} | ({"data"} if "loss" in at else set())
    else:
        found |= _of_counts(at) | _of_figures(view, at)
    # A KL shows weights more closely than a loss or a norm.
    metric = "metrics" in at and _is_another_metric(view)
    if (metric or at & {"loss", "grad_norm", "weights"}) and not at & {"rollouts", "step"}:
        found |= _of_updates_before(view)
        if metric and view.first == 0 and _far_from_the_start(view):
            found |= {"weights"}
    if not _trained_apart(view):
        found |= {"logging"}
    return tuple(name for name in CLASSES if name in found)


def _may_differ_at_first(view: View) -> set[str]:
    """The fields that differ in the first step that does, and those that do later and are not recorded there."""
    if view.first == len(view.pairs):
        return view.fields
    sides = view.pairs[view.first]
    lacking = {name for name in _FIGURES if any(getattr(one, name) is None for one in sides)}
    return view.at_first | (lacking & view.fields)


def _of_rate(view: View, at: set[str]) -> set[str]:
    found = {"schedule", "optimizer settings"} | (_of_loss(view) if "loss" in at and view.first == 0 else set())
    # No rate of a step changes its own norm: a second fault does, or the rate is logged wrong beside one.
    return found | ({"gradient", "loss", "clipping", "logging"} if "grad_norm" in at else set())


def _of_figures(view: View, at: set[str]) -> set[str]:
    """By the first of loss, gradient norm and weights that differs."""
    if "loss" in at:
        return _of_loss(view) | (_of_update(view) | {"logging"} if _of_two(view) else set())
    if "grad_norm" in at:
        # A loss may have another gradient and the same value; a norm is of what the optimizer holds, and may be taken
        # behind the clipping.
        found = {"gradient", "loss", "clipping", "optimizer settings"} | ({"weights"} if view.first else set())
        if view.loose or _loss_tells_nothing(view) or _loss_hides_as_much(view):
            found |= {"data"} | ({"weights"} if _far_from_the_start(view) else set())
        if _may_be_of_advantages(view):
            found |= {"weights"} if view.first == 0 and _far_from_the_start(view) else set()
            # Losses below 0 are no cross-entropies, whatever later ones are; other data seldom have as many tokens.
            policy = _least_loss(view) <= 0 and not view.recorded("tokens")
            found |= {"data"} if policy or view.agrees("loss") else set()
        return found | ({"weights"} if view.apart_at_start else set())
    return _of_update(view) if "weights" in at else set()


def _of_counts(at: set[str]) -> set[str]:
    found = {"data", "loss"} if at & {"tokens", "prompts", "metrics"} else set()
    return found | ({"gradient", "data"} if at & {"total", "passes", "idle_passes"} else set())


def _is_another_metric(view: View) -> bool:
    """Whether both sides have a number for a metric that differs in the first step that does."""
    if view.first == len(view.pairs):
        return False
    a, b = (one.metrics for one in view.pairs[view.first])
    both = a.keys() & b.keys() & view.other_metrics
    return any(a[it] != b[it] and math.isfinite(a[it]) and math.isfinite(b[it]) for it in both)


def _of_loss(view: View) -> set[str]:
    found = {"data", "loss"}
    if "grad_norm" in view.at_first or not view.recorded("grad_norm") or _norm_hides_as_much(view):
        found |= {"gradient"}  # a logged loss is a weighted mean too, and may have the gradient's wrong weights
    if view.first > 0 or _far_from_the_start(view):
        found |= {"weights"}
    return found


def _loss_tells_nothing(view: View) -> bool:
    """Whether losses say nothing of the weights and of the data that they are of.

    Where each token has the ratio 1 they are means of advantages: the same in every digit behind weights that differ.
    Advantages that add up to nothing leave no more than rounding. Nor does one tell that was not recorded in the step
    that parts.
    """
    if _lacks_loss(view):
        return True
    # A skipped step may have no loss.
    losses = [(a.loss, b.loss) for a, b in view.pairs[view.first :] if a.loss is not None and b.loss is not None]
    same = view.weights_differ and len(losses) > 1 and all(a == b for a, b in losses)
    # Nor do those that nobody recorded.
    none = not losses and view.first < len(view.pairs)
    return none or same or (bool(losses) and max(map(abs, losses[0])) <= EPS[view.comparison.dtype])


def _lacks_loss(view: View) -> bool:
    """Whether a side has no loss in the first step that differs."""
    return view.first < len(view.pairs) and None in (one.loss for one in view.pairs[view.first])


def _loss_hides_as_much(view: View) -> bool:
    """Whether a loss would not show what moves the gradient norm by as little as it is off.

    It has few digits, or is off within its bound.
    """
    if view.first == len(view.pairs):
        return False
    loss, norm = (view.ratios(name)[view.first] for name in ("loss", "grad_norm"))
    left_open = max(view.loss_digits, 0.0 if loss is None else abs(loss - 1))
    return norm is not None and abs(norm - 1) < _HIDDEN * left_open


def _may_be_of_advantages(view: View) -> bool:
    """Whether losses of the record are hardly means of cross-entropies, and agree in the step that parts.

    Where each token has the ratio 1, as in a first step, a loss of a policy has neither weights nor tokens in it. Where
    that is so in all steps, other data with the same rewards have the same losses in all of them.
    """
    if view.first == len(view.pairs):
        return False  # a mean over all steps alone differs
    a, b = view.pairs[view.first]
    return near(b.loss, a.loss or 0.0, EPS["fp32"]) and _least_loss(view) < _OF_WORDS


def _least_loss(view: View) -> float:
    return min((one.loss for pair in view.pairs for one in pair if one.loss is not None), default=math.inf)


def _norm_hides_as_much(view: View) -> bool:
    """Whether norms that pass in a wide bound are not much nearer than the losses, which do not."""
    if view.first == len(view.pairs) or not view.loose:
        return False
    loss, norm = (view.ratios(name)[view.first] for name in ("loss", "grad_norm"))
    return loss is None or norm is None or abs(norm - 1) > _CREPT * abs(loss - 1)


def _of_two(view: View) -> bool:
    """Whether a loss and weights part in a step whose gradients have one norm: the loss may be logged wrong, besides.

    One fault of the loss has another norm, but for a sign.
    """
    if "weights" not in view.at_first or "grad_norm" in view.at_first:
        return False
    a, b = view.pairs[view.first]
    other_sign = near(b.loss, -(a.loss or 0.0), _SAME)
    return near(b.grad_norm, a.grad_norm or 0.0, EPS["fp32"]) and not other_sign


def _far_from_the_start(view: View) -> bool:
    """Whether the runs may start from other weights: headers don't say, and the first step's are not alike."""
    moves = Moves(view)
    if moves.starts is not None:
        return not moves.one_start
    if view.apart_at_start is not None:
        return view.apart_at_start > 0
    return "weights" in view.at_first or not view.recorded("weights")


def _of_update(view: View) -> set[str]:
    """What may be wrong where the weights are the first to differ.

    A gradient that is negated, or whose numbers changed places, has the norm of the right one. Another learning rate
    makes the whole update longer or shorter, and turns it nowhere; of several groups one alone may have another rate.
    """
    moves, a = Moves(view), view.pairs[view.first][0] if view.first < len(view.pairs) else None
    found = {"clipping", "optimizer settings", "weights"}
    # Where a loss may be another and pass, that it agrees says nothing of it, nor of the data that it is of: negated
    # advantages of groups, which add up to nothing, leave the loss of the right ones.
    # So do the exchanged answers of pairs where the policy is still the reference's.
    says_nothing = view.loose or _loss_tells_nothing(view) or (_losses_follow(view) and may_be_opposite(view, moves))
    of_gradient = {"gradient"} | ({"loss", "data"} if says_nothing else set())
    if not view.recorded("grad_norm"):
        return found | {"schedule", "loss"} | of_gradient
    turned = a is not None and (multiple(view, moves) is False or moves.turned(view.first))
    if a is None or not turned or len(a.lr or ()) > 1:
        found |= {"schedule"}
    times = None if a is None else entered(view, moves)
    return found if times is not None and times > 0 else found | of_gradient


def _losses_follow(view: View) -> bool:
    """Whether no later loss, or another one than the reference's, is recorded behind the first update that differs."""
    later = view.pairs[view.first + 1 :]
    return not later or any(not near(b.loss, a.loss or 0.0, EPS["fp32"]) for a, b in later)


def _crept(view: View) -> bool:
    """Whether weights had come apart before the first difference, or in all steps where only a mean over them differs.

    They lie within their bound there. In a short type they may do so as far apart as training moves them.
    """
    if view.comparison.dtype in DRIFT and view.first and "weights" not in view.fields and not view.weights_tell:
        return True
    rows = view.comparison.rows
    before = [row for row in rows if row.step < view.step(view.first)] if view.at_first else rows
    known = [(row.weights, view.comparison.bound("weights", row.terms)) for row in before if row.weights is not None]
    return any(gap > min(_CREPT * bound, EPS[view.comparison.dtype]) for gap, bound in known[-1:])


def _of_updates_before(view: View) -> set[str]:
    """What may be wrong in an update that lies in front of the first difference, and in steps that do."""
    if view.steps_left_out:
        return {*_OF_UPDATE, "data", "loss", "gradient"}
    # Where weights are not recorded, nothing tells of an update's gradient; nor does it where norms are not.
    if view.unseen:
        return _OF_UPDATE | {"gradient"}
    if not _crept(view):
        return set()
    return _OF_UPDATE if view.recorded("grad_norm") else {*_OF_UPDATE, "gradient", "loss"}


def _trained_apart(view: View) -> bool:
    """Whether weights show that training itself was another, from the first step on that differs.

    Where weights part later, another fault may have done it than that which was logged before. A step that one side
    leaves out, or calls skipped, may have been taken all the same. Weights of one step number show nothing where the
    candidate's, in their order, are those of other steps of the reference.
    """
    if not view.weights_differ or "step" not in view.fields:
        return view.weights_differ and "weights" in view.at_first
    of_reference = iter([one.weights for one in view.reference.steps])
    return not all(one.weights is not None and one.weights in of_reference for one in view.candidate.steps)
