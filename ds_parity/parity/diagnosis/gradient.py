"""The same windows and rates with another gradient, or another update."""

from __future__ import annotations

from collections.abc import Iterator

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.view import View, alike, near


def causes(view: View) -> Iterator[Cause]:
    """Yield what would change the gradient so, asked at the first step that differs: weights were still the same."""
    if "skipped" in view.at_first or _not_finite(view):
        yield from _nan(view)
    elif "lr" in view.at_first:
        return
    elif "grad_norm" in view.at_first and "loss" not in view.at_first:
        yield from _factors(view)
        yield from _weighting(view)
    elif {"grad_norm", "loss"} <= view.at_first:
        yield from _denominator(view)
        yield from _data(view)
        yield from _loss(view)
    elif "weights" in view.at_first and "loss" not in view.at_first:
        yield from _update(view)


def _not_finite(view: View) -> bool:
    if view.first == len(view.pairs):
        return False
    a, b = view.pairs[view.first]
    return any(_bad(getattr(b, name)) and not _bad(getattr(a, name)) for name in ("loss", "grad_norm"))


def _bad(value: float | None) -> bool:
    return value is not None and not abs(value) < float("inf")


def _nan(view: View) -> Iterator[Cause]:
    a, b = view.pairs[view.first]
    if not b.skipped and not _not_finite(view):
        return
    idle = view.idle[view.first]
    said = f"step {a.step} came to {'no update' if b.skipped else 'NaN'}; of its passes {idle} were idle"
    yield Cause("idle-nan", 0.7 if idle else 0.3, said)
    yield Cause("zero-denominator", 0.6, said)


def _known(view: View) -> list[tuple[int, float]]:
    return [(i, r) for i, r in enumerate(view.ratios("grad_norm")) if r is not None and i >= view.first]


def _factors(view: View) -> Iterator[Cause]:
    known = _known(view)
    ratios = [ratio for _, ratio in known]
    if not ratios:
        return
    factor = ratios[0]
    if view.first == 0 and alike(ratios):
        constant = list(_constant(view, factor, len(ratios)))
        yield from constant
        # Passes or ranks that explain every step are the nearer cause, where the total happens to be as many.
        if not {cause.name for cause in constant} & {"gas-scaled-twice", "dp-mean-left-in"}:
            yield from _divided_already(view, factor)
        return
    totals = view.totals
    yield from _divided_already(view, factor)
    counted = [(1 / r - 1) * totals[i] / view.idle[i] for i, r in known if r and view.idle[i]]
    if view.first == 0 and len(counted) > 1 and alike(counted, 0.1) and counted[0] > 0:
        said = f"norms fit total / (total + {counted[0]:.4g} for each idle pass) in {len(counted)} steps"
        yield Cause("idle-counted", 0.9, said)
    if len(known) > 1 and factor and alike([totals[i] / r for i, r in known if r], 0.01):
        yield Cause(
            "target-not-actual", 0.95, f"norms are total / {totals[known[0][0]] / factor:.6g} times the reference's"
        )
    before = [(i, r) for i, r in known if i > 0 and totals[i - 1]]
    fits = [near(r, totals[i] / totals[i - 1], 0.01) for i, r in before]
    if view.first == 1 and len(fits) > 1 and all(fits):
        yield Cause(
            "wrong-window",
            0.95,
            f"from step {view.step(1)} on norms are off by this window's total over the last one's",
        )


def _constant(view: View, factor: float, count: int) -> Iterator[Cause]:
    said = f"the gradient norm is {factor:.5g} times the reference's in all {count} steps"
    if view.ranks > 1 and (near(factor, 1 / view.ranks) or near(factor, view.ranks)):
        yield Cause("dp-mean-left-in", 0.9, f"{said}: the number of ranks is {view.ranks}")
    passes = view.passes[view.first]
    if passes > 1 and near(factor, 1 / passes):
        yield Cause("gas-scaled-twice", 0.9, f"{said}: windows have {passes} passes a rank")
    if view.ranks == 1 and (near(factor, round(factor)) or near(1 / factor, round(1 / factor))):
        yield Cause("sp-factor-by-stage", 0.7, f"{said}, on one data-parallel rank")
    yield Cause("constant-factor", 0.5, said)


def _divided_already(view: View, factor: float) -> Iterator[Cause]:
    """Whether the first norm that differs is too small by its window's total; weights were the same up to there."""
    total = view.totals[view.first]
    said = f"in step {view.step(view.first)} the gradient norm is {factor:.5g} times the reference's, 1 /"
    if total > 1 and near(factor, 1 / total):
        yield Cause("divided-already", 0.96, f"{said} {total:.6g}: the total")
    elif total > view.ranks > 1 and near(factor, view.ranks / total):
        yield Cause("divided-already", 0.85, f"{said} {total / view.ranks:.6g}: the total for each rank")


def _denominator(view: View) -> Iterator[Cause]:
    """Losses and norms that were divided by something else, though the data and its total, or its counts, agree."""
    loss, norm = view.ratios("loss")[view.first], view.ratios("grad_norm")[view.first]
    if loss is None or norm is None:
        return
    if "total" not in view.fields:
        if near(loss, norm):
            yield from _divided_already(view, norm)
        return
    a, b = view.pairs[view.first]
    if "total" not in view.at_first or view.at_first & {"rollouts", "tokens"} or not (a.total and b.total):
        return
    said = f"the total of step {a.step} is {b.total:.6g} where the reference has {a.total:.6g}"
    factor = a.total / b.total
    by_ranks = near(factor, view.ranks) or near(factor, 1 / view.ranks)
    if view.ranks > 1 and by_ranks and near(loss, factor) and near(norm, factor):
        times = f"loss and gradient norm are {factor:.4g} times the reference's"
        yield Cause("sum-over-ranks", 0.95, f"{said}, and {times}: the number of ranks is {view.ranks}")
    # A total that is no count is a sum of weights that micro-batches bring.
    elif a.total not in (a.rollouts, a.tokens, a.prompts):
        yield Cause("weight-left-out", 0.9, f"{said}, of the same rollouts and tokens")


def _weighting(view: View) -> Iterator[Cause]:
    """What has no factor of its own: which of these it is shows in how far norms are off, and where."""
    known = _known(view)
    ratios = [ratio for _, ratio in known]
    if not ratios or (view.first == 0 and alike(ratios)):
        return
    listed = ", ".join(f"{ratio:.4g}" for ratio in ratios[:6])
    said = f"losses agree and norms do not, by no one factor ({listed})"
    off = max(abs(ratio - 1) for ratio in ratios)
    if view.first > 0:
        later = [abs(ratio - 1) for ratio in ratios[1:]]
        once = bool(later) and max(later) < 0.02
        yield Cause("mid-window-checkpoint", 0.7 if once else 0.4, f"{said}, first in step {view.step(view.first)}")
        yield Cause("sticky-boundary", 0.6, f"{said}, first in step {view.step(view.first)}")
        return
    mean = sum(ratios) / len(ratios)
    yield Cause("running-total", 0.7 if min(ratios) > 1.2 else 0.2, said)
    yield Cause("last-backward-only", 0.6 if 0.3 < mean < 0.87 and off > 0.2 else 0.35, said)
    yield Cause("mean-of-micro-batches", 0.55, said)
    yield Cause("half-broadcast", 0.5 if off > 0.6 else 0.3, said)
    yield Cause("aux-term-scaled-apart", 0.58 if off < 0.1 else 0.25, said)
    yield Cause("late-boundary", 0.62 if min(ratios) > 0.9 and mean > 1.1 else 0.3, said)


def _data(view: View) -> Iterator[Cause]:
    """Other data in as many rollouts, from a step on; as a rule those that were trained on before."""
    after = [
        (b.loss, a.loss, then.loss) for (a, b), (then, _) in zip(view.pairs[view.first :], view.pairs, strict=False)
    ]
    known = [(x, y, z) for x, y, z in after if x is not None and y is not None and z is not None]
    if view.first == 0 or not known:
        return
    begins = f"the {view.first} steps before step {view.step(view.first)} agree, it has another loss"
    # Weights have moved since, so losses come back by about.
    if len(known) > 1 and max(abs(x - z) for x, _, z in known) < 0.1 * max(abs(y - z) for _, y, z in known):
        losses = ", ".join(f"{x:.4g} for {z:.4g}" for x, _, z in known[:3])
        yield Cause(
            "resume-repeats-data",
            0.9,
            f"{begins}; losses from there on are near those of step {view.step(0)} and after: {losses}",
        )
    elif view.at_first & {"tokens"}:
        yield Cause("resume-repeats-data", 0.7, f"{begins}, and other tokens")


def _loss(view: View) -> Iterator[Cause]:
    losses = [(i, r) for i, r in enumerate(view.ratios("loss")) if r is not None]
    close = [i for i, r in losses if near(r, 1.0, 0.01)]
    apart = [i for i, r in losses if not near(r, 1.0, 0.05)]
    seeds = view.reference.header.seed != view.candidate.header.seed
    off = dict(losses).get(view.first)
    times = "" if off is None else f" ({off:.4g} times)"
    said = f"step {view.step(view.first)} has the same rollouts, tokens and LR, and another loss{times}"
    if close and apart:
        some = f"{said}; the losses of steps {[view.step(i) for i in close]} are within 1 % of the reference's"
        yield Cause("mixed-weights", 0.6, some)
        yield Cause("unmasked-numerator", 0.55, some)
    yield Cause("data-or-seed", 0.95 if seeds else 0.5, said + (", and the seeds differ" if seeds else ""))
    yield Cause("global-metadata", 0.52 if not seeds else 0.2, said)
    yield Cause("shared-padding", 0.51 if sum(view.idle) and not seeds else 0.2, said)


def _update(view: View) -> Iterator[Cause]:
    norm = view.pairs[view.first][0].grad_norm
    shown = "unknown" if norm is None else f"{norm:.4g}"
    said = f"in step {view.step(view.first)} loss, LR and gradient norm ({shown}) agree and the weights after it do not"
    before = [pair[0].grad_norm or 0.0 for pair in view.pairs[: view.first]]
    clipped = norm is not None and norm > 1.0 and all(value <= 1.0 for value in before)
    yield Cause("implicit-clip", 0.8 if clipped else 0.3, said)
    if view.first > 0:
        yield Cause("resume-loses-optimizer", 0.75, f"{said}; {view.first} steps before it agree in all")
    yield Cause("clip-at-wrong-scale", 0.7 if not clipped else 0.5, said)
    yield Cause("optimizer", 0.4, said)
