"""The same training, logged in another way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from ds_parity.parity.comparison.bounds import EPS
from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.effects import COUNTED, SPLIT
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.gradient import agreeing, unproven, until
from ds_parity.parity.diagnosis.gradient import causes as of_gradients
from ds_parity.parity.diagnosis.nearness import alike, near, told
from ds_parity.parity.diagnosis.view import View

_SINGLE = 1e-5  # of the greatest loss: what few sums in single precision leave

_TERM = 0.01  # of a gradient norm
_ALL_NEW = 0.99  # of a loss
_LEAST_SHARE = 0.03  # of a loss: whole numbers lie so close beyond it that any loss is nearly one over them


def causes(view: View) -> Iterator[Cause]:
    """Yield what would change what is written down and nothing else, where the record proves that nothing else did.

    Where it proves as much of all but the lengths of gradients, a logged number is a cause beside what changes these.
    """
    if not view.trained_alike:
        yield from _unproven(view)
        return
    if "skipped" in view.fields:
        return  # none of these calls a step skipped that was taken
    if "loss" in view.fields and not view.fields & {"grad_norm", "lr"}:
        yield from _loss(view)
    if "grad_norm" in view.fields and not view.fields & {"loss", "lr"}:
        yield from _norm(view)
    if "metrics" in view.fields and not view.fields & {"loss", "grad_norm", "lr"}:
        yield from _metrics(view)
    counts = view.fields & COUNTED
    if counts - SPLIT and not view.fields & {"loss", "grad_norm", "lr", "metrics"}:
        said = f"{', '.join(sorted(counts))} differ, and {_proof(view)}"
        yield Cause("reported-counts", Fit.ALONE, said)


def _unproven(view: View) -> Iterator[Cause]:
    alone = view.norms_alone
    if alone is not None and alone.trained_alike:
        yield from _norm(alone, until(view))
    if not view.forgetting or "lr" in view.fields or {"loss", "grad_norm"} <= view.fields:
        return
    if "loss" in view.fields and view.recorded("grad_norm"):
        return  # norms that lie apart within a wide bound may be those of this loss
    if "loss" in view.fields:
        found, factor = list(_loss(view)), _one_factor(view)
        said = f"{found[0].evidence}, as {view.forgetting} leaves them where gradients have a factor, too"
        names, fit = [cause.name for cause in found], found[0].fit
        if fit is Fit.EVERY_STEP:
            names.append("gas-scaled-twice")
        else:
            # A divisor that is another one in each step is in the gradients, too, and these forget it.
            more, fit = ("constant-factor", Fit.CONSTANT) if factor else ("another-divisor", Fit.PATTERN)
            names.append(more)
        yield from (Cause(name, fit, said) for name in names)
    elif "grad_norm" in view.fields and (said := _pattern_of_norms(view)):
        yield Cause("reported-norm", Fit.EVERY_STEP, f"{said}{unproven(view)}")
    elif "grad_norm" in view.fields and _clearly_off(view) and not any(of_gradients(view)):
        # A factor that the gradient of a part of the parameters has is none of the whole norm.
        said = f"the logged gradient norm is off by no one factor{unproven(view)}"
        for name in ("reported-norm", "another-divisor", "constant-factor"):
            yield Cause(name, Fit.PATTERN, said)


def _clearly_off(view: View) -> bool:
    """Whether a norm is off by more than a small term of the loss changes it, which such weights don't show either."""
    return any(it is not None and not near(it, 1.0, _TERM) for it in view.ratios("grad_norm"))


def _proof(view: View, behind: str = "") -> str:
    return f"{agreeing(view)} agree in every step{behind}"


def _loss(view: View) -> Iterator[Cause]:
    if scaled := [*_over_passes(view)]:
        yield from scaled
        return
    factor, exact = _one_factor(view), exact_factor(view)
    if lost := _without_a_loss(view):
        none = all(b.loss is None for _, b in view.pairs if not _is_number(b.loss))
        what = "no loss is logged" if none else "a loss that is not finite, or none, is logged"
        said = f"{what} in step {', '.join(map(str, lost[:5]))}{', ...' if lost[5:] else ''}, where the "
        said += f"reference has one; {_proof(view)}"
    elif factor and not exact:
        said = f"the logged loss is about {factor:.3g} times the reference's in every step, within rounding; "
        said += _proof(view)
    elif factor:
        said = f"the logged loss is {told(factor)} times the reference's in every step; {_proof(view)}"
    elif (share := _smoothed(view)) is not None:
        said = f"the logged loss is a moving average of the reference's, {share:.4g} of it new; {_proof(view)}"
    else:
        said = f"the logged loss differs by no one factor; {_proof(view)}"
    yield Cause("reported-loss", Fit.ALONE, said)
    if not lost and not exact:  # what lies within wide bounds of one factor may have none
        yield Cause("metrics-mean-of-ranks", Fit.ALONE, said)
        yield Cause("loss-with-this-gradient", Fit.ALONE, said)
    if not lost and _by_whole_numbers(view):  # passes that are in neither log may be these
        yield Cause("returned-loss-scaled", Fit.ALONE, said)


def _over_passes(view: View) -> Iterator[Cause]:
    """Losses that are the reference's, each divided by the passes of its own window."""
    factor, passes = _one_factor(view), _passes(view)
    if not all(passes) or max(passes, default=0) < 2:
        return
    divided = _divided(view, passes)
    if len(set(passes)) == 1:
        if divided or (factor and near(1 / factor, passes[0], max(1e-3, EPS[view.comparison.dtype]))):
            times = factor or 1 / passes[0]
            said = f"the loss is {times:.5g} times the reference's, and windows have {passes[0]} passes; "
            yield Cause("returned-loss-scaled", Fit.CONSTANT, said + _proof(view))
    elif divided:
        listed = ", ".join(map(str, passes[:5])) + (", ..." if passes[5:] else "")
        said = f"each loss is the reference's, divided by the passes of its window ({listed}); {_proof(view)}"
        yield Cause("returned-loss-scaled", Fit.EVERY_STEP, said)


def _divided(view: View, passes: list[int]) -> bool:
    """Whether each loss is the reference's over so many passes, within rounding and the digits that were written."""
    known = [(a.loss, b.loss, of) for (a, b), of in zip(view.pairs, passes, strict=True)]
    off = [(abs(y - x / of), _slack(view, x, of, y)) for x, y, of in known if x is not None and y is not None]
    greatest = max((abs(x / of) for x, _, of in known if x is not None), default=0.0)
    return len(off) == len(known) and greatest > 0 and all(by <= _allowed(view) * greatest + may for by, may in off)


def _by_whole_numbers(view: View) -> bool:
    """Whether no log holds passes, and each loss is the reference's over a whole number."""
    ratios = view.ratios("loss")
    if any(view.passes) or any(_passes(view)) or any(not it or not _LEAST_SHARE < it < 1.5 for it in ratios):
        return False
    passes = [round(1 / it) for it in ratios if it]
    return max(passes) > 1 and _divided(view, passes)


def _passes(view: View) -> list[int]:
    """The passes of each window, by the reference where the candidate's log holds none; the torch reference has one."""
    if any(view.passes) or view.reference.header.engine == "torch":
        return view.passes
    return [a.passes or 0 for a, _ in view.pairs]


def _slack(view: View, loss: float, passes: int, logged: float) -> float:
    """By how much a loss divided by passes may lie from the logged one where either was written in few digits."""
    written = [trace.precision.get("loss") for trace in (view.reference, view.candidate)]
    sides = zip(written, (loss, logged), (passes, 1), strict=True)
    return sum((how.slack(value) / of for how, value, of in sides if how is not None), start=0.0)


def _without_a_loss(view: View) -> list[int]:
    """The steps without a logged loss, or with one that is no number, if all other losses are the reference's."""
    known = [(at, a.loss, b.loss) for at, (a, b) in enumerate(view.pairs) if a.loss is not None]
    lost = [at for at, x, y in known if math.isfinite(x) and not _is_number(y)]
    others = [(x, y) for at, x, y in known if at not in lost]
    least = _SINGLE * max((abs(x) for x, _ in others), default=0.0)
    alike = all(y is not None and (x == y or abs(x - y) <= least) for x, y in others)
    return [view.step(at) for at in lost] if alike else []


def _is_number(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def exact_factor(view: View) -> bool:
    """Whether logged losses are one multiple of the reference's, as exactly as single precision writes them."""
    return _one_factor(view, _SINGLE) is not None


def _one_factor(view: View, share: float | None = None) -> float | None:
    """The one factor by which the logged losses are off, if there is one; small losses are rounded as large ones.

    Args:
        view: two traces.
        share: of the greatest loss, by which losses may be off; None: what their bounds allow.
    """
    pairs = [(a.loss, b.loss) for a, b in view.pairs if a.loss is not None and b.loss is not None]
    greatest, its = max(pairs, key=lambda pair: abs(pair[0]), default=(0.0, 0.0))
    if len(pairs) < 2 or not greatest:
        return None
    factor = its / greatest
    allowed = (share or _allowed(view)) * abs(its)
    return factor if factor and all(abs(y - factor * x) <= allowed for x, y in pairs) else None


def _allowed(view: View) -> float:
    """By which share of the greatest loss a predicted one may be off: small losses are rounded as large ones."""
    return max(_SINGLE, 2 * view.comparison.bound("loss", 1))


def _smoothed(view: View) -> float | None:
    """How much of the new loss a moving average takes, if the logged losses are one."""
    losses = [(a.loss, b.loss) for a, b in view.pairs]
    if any(x is None or y is None for x, y in losses):
        return None
    shares = [
        (now - before) / (new - before)
        for (_, before), (new, now) in pairwise(losses)
        if before is not None and now is not None and new is not None and new != before
    ]
    # What is new but for rounding is no average.
    return shares[0] if len(shares) > 1 and alike(shares, 1e-3) and 0 < shares[0] < _ALL_NEW else None


def _norm(view: View, behind: str = "") -> Iterator[Cause]:
    said = _pattern_of_norms(view) or "the logged gradient norm differs"
    yield Cause("reported-norm", Fit.ALONE, f"{said}; {_proof(view, behind)}")


def _pattern_of_norms(view: View) -> str:
    """What was made of the reference's norms, if the logged ones follow from them; empty: not known."""
    known = [(a.grad_norm, b.grad_norm) for a, b in view.pairs if a.grad_norm and b.grad_norm]
    limit = max((y for _, y in known), default=0.0)
    if known and all(near(y, x * x, 1e-4) for x, y in known):
        return "the logged gradient norm is the square of the reference's"
    # A limit that one norm alone shows is read off that norm, and any number is one.
    cut = sum(near(y, limit, 1e-4) and not near(y, x, 1e-4) for x, y in known)
    if cut > 1 and all(near(y, min(x, limit), 1e-4) for x, y in known):
        return f"the logged gradient norm is the reference's after clipping at {limit:.4g}"
    if len(known) > 2 and all(near(y, x, 1e-4) for (x, _), (_, y) in pairwise(known)):
        return "the logged gradient norm is that of the step before"
    return ""


def _metrics(view: View) -> Iterator[Cause]:
    held = {name for a, b in view.pairs for name in a.metrics.keys() & b.metrics.keys()}
    for name in sorted(held & view.other_metrics):
        values = [(a.metrics.get(name), b.metrics.get(name), a.rollouts or 0) for a, b in view.pairs]
        known = [(x, y, count) for x, y, count in values if x is not None and y is not None]
        if any(math.isnan(y) and not math.isnan(x) for x, y, _ in known):
            said = f"{name} is NaN where the reference has a number; {_proof(view)}"
            yield Cause("nan-in-metric-reduce", Fit.ALONE, said)
            continue
        apart = _farthest([(x, y) for x, y, _ in known])
        if not apart:
            continue  # NaN in both, which equals nothing
        listed = ", ".join(f"{y:.4g} for {x:.4g}" for x, y in apart)
        if _accumulates(known):
            said = f"{name}: {listed}; it holds the step before too, and {_proof(view)}"
            yield Cause("reset-gated-by-logging", Fit.EVERY_STEP, said)
        else:
            for cause in ("reported-metric", "accuracy-of-means"):
                yield Cause(cause, Fit.ALONE, f"{name}: {listed}; {_proof(view)}")


def _farthest(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The four pairs that lie farthest apart, in their order; none of them is of equal numbers, or NaN twice."""
    far = [(_apart(x, y), at) for at, (x, y) in enumerate(pairs)]
    most = sorted((one for one in far if one[0]), key=lambda one: (-one[0], one[1]))[:4]
    return [pairs[at] for at in sorted(at for _, at in most)]


def _apart(x: float, y: float) -> float:
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    return abs(y - x) if math.isfinite(x) and math.isfinite(y) else math.inf


def _accumulates(known: list[tuple[float, float, int]]) -> bool:
    """Whether a step that is off is the mean of it and the one before."""
    fits = []
    for (x, _, m), (y, value, n) in pairwise(known):
        if value != y and m + n:
            fits.append(near(value, (x * m + y * n) / (m + n), 1e-6))
    return bool(fits) and all(fits)
