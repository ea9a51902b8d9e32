"""The same windows, rates and weights with another gradient: by what factor in each step.

Where weights are still the same, the gradient norm of a step is off by exactly what its loss was divided by. From then
on weights differ, and the norm follows them: a factor fits a later step within an allowance. Beyond it a norm is held
against the factor only where the update shows that other weights have not made it so (`_by_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.gradient_factors import Prediction, predictions
from ds_parity.parity.diagnosis.moves import ABOUT, Moves, along
from ds_parity.parity.diagnosis.nearness import near, told
from ds_parity.parity.diagnosis.view import View

# Of what a fault changes: a norm that it hardly changes must fit so much better.
_FIRST, _LATER = 0.01, 0.05
_ALIGNED, _ANOTHER = 0.02, 0.15
_SHORT = 0.25  # of a gradient: what may lie in another direction of one that has the reference's
_LIKE_NORM = 0.1
# Other weights turn a gradient by a third and more of what they add to its length, another factor not at all.
_TURNED = 0.1
# A norm that is nearer to the reference's says nothing of a direction.
_HARDLY = 0.003


def causes(view: View) -> Iterator[Cause]:
    """Yield what changes the gradient norm by exactly the factors that were recorded."""
    if "skipped" in view.at_first or not_finite(view):
        yield from _nan(view)
    elif "lr" not in view.at_first and "grad_norm" in view.at_first and not only_logged(view):
        yield from _denominator(view)
        if "total" not in view.at_first and ("loss" not in view.at_first or _both(view)):
            yield from _factors(view)


def only_logged(view: View) -> bool:
    """Whether norms are proved to be logged wrong: by all steps, or by those in front of another fault."""
    return view.trained_alike or (view.norms_alone is not None and view.norms_alone.trained_alike)


def not_finite(view: View) -> bool:
    """Whether the candidate's loss or gradient norm of the first step that differs is NaN, or infinite."""
    if view.first == len(view.pairs):
        return False
    a, b = view.pairs[view.first]
    return any(_bad(getattr(b, name)) and not _bad(getattr(a, name)) for name in ("loss", "grad_norm"))


def _bad(value: float | None) -> bool:
    return value is not None and not abs(value) < float("inf")


def _nan(view: View) -> Iterator[Cause]:
    """Steps that come to NaN or nothing, if they are those with idle passes, all of them and no others."""
    first = view.first
    lost = [b.skipped or _bad(b.grad_norm) or _bad(b.loss) for _, b in view.pairs]
    idle = [bool(it) for it in view.idle]
    # Where all windows have idle passes, they tell nothing.
    if all(idle) or any(idle[:first]) or not idle[first]:
        return
    step = view.step(first)
    if view.pairs[first][1].skipped and idle == lost:
        said = f"step {step} comes to no update, and so does every step with idle passes and no other"
    # One NaN in the weights makes NaN of every later step, so that the first one has to tell.
    elif all(lost[first:]) and first and "loss" not in view.at_first and view.recorded("loss"):
        said = f"step {step} is the first with idle passes, and the first whose gradient is NaN; its loss is right"
    else:
        return
    for name in ("idle-nan", "zero-denominator"):
        yield Cause(name, Fit.PATTERN, said)


def _both(view: View) -> bool:
    """Whether loss and gradient norm are off by one factor: what was divided is also what is logged."""
    loss, norm = view.ratios("loss")[view.first], view.ratios("grad_norm")[view.first]
    return loss is not None and norm is not None and _near(loss, norm, _FIRST)


def parallel(view: View) -> bool | None:
    """Whether the gradients that differ are multiples of the reference's; None where the record can't tell.

    With SGD the gradient of a step is a sum of the update and of the one before it (momentum). So what a multiple adds
    to the weights lies in the plane of these two, and what another gradient adds does not. Where the run begins isn't
    known, and so the first update is not: there the next step tells, to which momentum carries the first difference.

    Other optimizers add no gradients up, and where none is named nothing is said. Another direction is told only of
    what Nesterov's momentum and the decay of weights leave over, too, and of a step whose weights were still the same:
    from then on gradients have another direction because of the weights.
    """
    moves, at = Moves(view), view.first
    if not moves.known or not moves.linear or at >= len(view.pairs):
        return None
    norms = view.ratios("grad_norm")
    updates = moves.update(at), moves.update(at - 1) if at > 0 else None
    same = updates[0] is not None and (at == 0 or updates[1] is not None)
    if same:
        apart, basis = moves.apart(at), [*updates]
    else:
        at += 1
        if at >= len(view.pairs) or near(norms[at], 1.0, _HARDLY):
            return False if moves.too_far else None
        apart, basis = moves.widened(at), [moves.update(at), moves.update(at - 1), moves.apart(at - 1)]
    plane = [it for it in basis if it is not None]
    shares, rest = along(apart, plane)
    length = norms[at] or math.nan
    off = length - 1
    # What a short gradient adds is little of what is missing of the reference's.
    if rest < _ALIGNED and rest * abs(off) < _SHORT * length:
        if abs(shares[0] - off) <= _LIKE_NORM * min(abs(off), length):
            return True  # the update has as much more of the gradient as the norm says
        if same and abs(1 + shares[0] + length) <= _LIKE_NORM * length:
            return False  # as long, the other way
    if not same:
        return False if moves.too_far else None
    another = moves.clear(at) and along(apart, [*plane, *moves.carried(at)])[1] > _ANOTHER
    return False if another else None


def _fits(view: View, predicted: Sequence[float | None], *, by_weights: bool = False) -> bool:
    """Whether the norms are off by the predicted factors: one for each step from the first that differs on.

    Later norms may be off from these as well where other weights explain it, if they are asked about (`by_weights`).
    """
    ratios, moves = view.ratios("grad_norm")[view.first :], Moves(view)
    pairs = enumerate(zip(ratios, predicted, strict=True), start=view.first)
    known = [(at, r, p) for at, (r, p) in pairs if r is not None and p is not None]
    if not known or known[0][0] != view.first or not _near(*known[0][1:], _FIRST):
        return False
    # Other weights come of what a cause has changed so far, and are there in steps that it leaves as they are, too.
    changed = accumulate((abs(p - 1) for _, _, p in known), max)
    later = (
        _near(r, p, _LATER, so_far) or (by_weights and _by_weights(moves, at, r, p))
        for (at, r, p), so_far in zip(known, changed, strict=True)
    )
    return all(later) and parallel(view) is not False


def _by_weights(moves: Moves, at: int, ratio: float, predicted: float) -> bool:
    """Whether other weights may be why a later gradient is so many times the reference's, and not as predicted.

    What they add to a gradient lies in other directions, too. Another factor leaves it in the reference's: then its
    share of the update is the ratio of the norms, and what the ratio is off by outweighs all that the update before
    (momentum) and that share leave over.
    """
    basis = [it for it in (moves.update(at), moves.update(at - 1), moves.widened(at - 1)) if it is not None]
    apart = moves.widened(at)
    shares, rest = along(apart, basis)
    times = 1 + shares[0]
    turned = rest * float(np.linalg.norm(apart)) >= _TURNED * moves.of_gradient(at, ratio - predicted)
    return turned or abs(times - ratio) >= abs(times - predicted)


def _near(ratio: float, predicted: float, share: float, changed: float | None = None) -> bool:
    """Whether a ratio is off from the predicted one by no more than a share of what is `changed`: the step's own."""
    changed = abs(predicted - 1) if changed is None else changed
    return abs(ratio - predicted) <= share * min(1.0, changed, abs(predicted))


def _factors(view: View) -> Iterator[Cause]:
    first = view.ratios("grad_norm")[view.first]
    if not first:
        return
    ratios = [it for it in view.ratios("grad_norm")[view.first :] if it is not None]
    found = _fitting(view, first, len(ratios))
    if found:
        said = _said(found, told(first), len(ratios)) + unproven(view.norms_alone or view, until(view))
        fits = {name: Fit.EVERY_STEP if it.varies else Fit.CONSTANT for name, it in found.items()}
        yield from (Cause(name, fit, said) for name, fit in fits.items())
        if _log_as_well(view):
            yield Cause("reported-norm", next(iter(fits.values())), said)
    elif parallel(view):
        listed = ", ".join(f"{it:.4g}" for it in ratios[:5])
        said = f"the gradients have the reference's direction, and {listed} times its length"
        found = _fitting(view, first, len(ratios), by_weights=True)
        if found:
            said += f": {_words(found)}, if it is other weights that make later ones longer or shorter than that"
        yield from (Cause(name, Fit.DIRECTION, said) for name in dict.fromkeys((*found, "another-divisor")))


def _log_as_well(view: View) -> bool:
    """Whether norms that were logged wrong leave the same record: nothing else differs that a factor would explain."""
    alone = view.norms_alone
    if alone is None:
        return bool(unproven(view))
    return alone is view or bool(unproven(alone)) or view.rates_differ_behind_norms


def _fitting(view: View, first: float, known: int, *, by_weights: bool = False) -> Mapping[str, Prediction]:
    """Return the predictions that fit the norms, of which `known` steps have a ratio.

    One number that all steps have proves no target and no weight of idle passes: it may be any constant. That a norm
    or two have one proves none either; of gradients that are known to be multiples (`by_weights`) it is not excluded.
    """
    constant = Prediction([first] * len(view.pairs), f"a constant {told(first)}", of_first_step=True)
    one_number = view.first == 0 and _fits(view, constant.factors, by_weights=by_weights)
    found = {
        name: it
        for name, it in predictions(view, first).items()
        if _fits(view, it.factors, by_weights=by_weights)
        and (not it.of_first_step or it.plausible or (it.varies and not one_number))
    }
    # Of a factor in all steps one that is known explains all, unless later norms leave open that it is another.
    if one_number and (by_weights or (all(it.of_first_step for it in found.values()) and (found or known > 2))):
        found["constant-factor"] = constant
    return found


def lengths(view: View) -> Iterator[str]:
    """Yield the faults of the whole gradient's length whose factor the first step that differs has."""
    ratios = view.ratios("grad_norm")[view.first :]
    first = ratios[0] if ratios else None
    if first:
        for name, it in predictions(view, first).items():
            factor = it.factors[0]
            if factor is not None and _near(first, factor, _FIRST) and it.plausible:
                yield name
        # The weights are nearly the same in the second step, too.
        if view.first == 0 and not (ratios[1:] and ratios[1] is not None and not near(ratios[1], first, ABOUT)):
            yield "constant-factor"
    yield "another-divisor"


def _said(found: Mapping[str, Prediction], first: str, known: int) -> str:
    """Return what the norms are in a sentence, of which `known` steps have a ratio, the first one `first`."""
    if found.keys() == {"constant-factor"}:
        return f"the gradient norm is {first} times the reference's in all {known} steps"
    listed = ", ".join("-" if it is None else f"{it:.4g}" for it in next(iter(found.values())).factors[:5])
    return f"gradient norms are {_words(found)} times the reference's ({listed})"


def _words(found: Mapping[str, Prediction]) -> str:
    return ", or ".join(dict.fromkeys(it.words for it in found.values()))


def unproven(view: View, behind: str = "") -> str:
    """Return what is said of weights that agree where a log that is off and a factor that is real look alike.

    Args:
        view: two traces, or those of their steps of which it is said.
        behind: what is said of these steps, as `until` tells.
    """
    if not view.forgetting or view.fields & {"loss", "lr"}:
        return ""
    leaves = f"as {view.forgetting} leaves them where gradients have a factor, too"
    return f"; {agreeing(view)} agree in every step{behind}, {leaves}"


def until(view: View) -> str:
    """Return up to which step gradient norms differ alone, in words; empty where it is all of them, or none."""
    alone = view.norms_alone
    return "" if alone is None or alone is view else f" up to step {alone.step(-1)}"


def agreeing(view: View) -> str:
    """Return which of loss, gradient norm and weights agree in every step."""
    return ", ".join(name for name in ("loss", "grad_norm", "weights") if view.agrees(name))


def facts(view: View) -> Iterator[str]:
    """Yield what is certain of the direction of the gradients, and in which steps they differ."""
    if "grad_norm" not in view.at_first or "loss" in view.at_first or not_finite(view):
        return
    if parallel(view) is False:
        yield "the gradients have another direction than the reference's: no one factor explains them"
    ratios = [it for it in view.ratios("grad_norm")[view.first :] if it is not None]
    if len(ratios) > 1 and all(near(it, 1.0, _HARDLY) for it in ratios[1:]) and not near(ratios[0], 1.0, 2 * _HARDLY):
        alone = f"of step {view.step(view.first)} is off"
        if view.weights_alike:
            yield f"only the gradient norm {alone}, and the weights agree"
        else:
            yield f"only the gradient {alone}; later norms follow from its weights"


def _denominator(view: View) -> Iterator[Cause]:
    """Losses and norms that were divided by another total, though the data agrees."""
    if "total" not in view.at_first or view.at_first & {"rollouts", "tokens"}:
        return
    a, b = view.pairs[view.first]
    loss, norm = view.ratios("loss")[view.first], view.ratios("grad_norm")[view.first]
    if loss is None or norm is None or not (a.total and b.total):
        return
    said = f"the total of step {a.step} is {b.total:.6g} where the reference has {a.total:.6g}"
    factor = a.total / b.total
    by_ranks = near(factor, view.ranks) or near(factor, 1 / view.ranks)
    if view.ranks > 1 and by_ranks and near(loss, factor, 1e-3) and near(norm, factor, 1e-3):
        times = f"loss and gradient norm are {factor:.4g} times the reference's"
        yield Cause("sum-over-ranks", Fit.CONSTANT, f"{said}, and {times}: the number of ranks is {view.ranks}")
    # A total that is no count is a sum of weights that micro-batches bring. A whole one may count tokens that nobody
    # recorded.
    elif a.total not in (a.rollouts, a.tokens, a.prompts) and not (a.tokens is None and a.total.is_integer()):
        yield Cause("weight-left-out", Fit.PATTERN, f"{said}{_counts(view)}")


def _counts(view: View) -> str:
    agree = [name for name in ("rollouts", "tokens") if view.agrees(name)]
    return f", though {' and '.join(agree)} agree" if agree else ""
