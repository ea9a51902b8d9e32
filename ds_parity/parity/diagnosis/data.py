"""Another loss at weights that are still the same: other data, another start, or another loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.moves import Moves
from ds_parity.parity.diagnosis.nearness import alike
from ds_parity.parity.diagnosis.view import View

# The first step can't take weights further apart than a few updates.
_BEYOND = 5.0
_MOST = 0.5
_CLEARLY = 0.01  # of the weights' norm: no type of numbers rounds as much
_BY_ABOUT = 0.1  # of what other data move a loss by
_AS_THEN = 0.5  # of what numbers go up and down by
_CHANCE = 1e-3  # that windows of other data have the tokens of earlier ones
_BY_CHANCE = 3  # losses of a run that learns rise so often in a row
_OTHER_START = "the headers tell of other weights before the first step"


def causes(view: View) -> Iterator[Cause]:
    """Yield what the headers, the weights or repeated counts show."""
    if "lr" in view.at_first:
        return
    if "loss" in view.at_first:
        yield from _seeds(view)
        yield from _start(view)
        yield from _repeated(view)
    elif "weights" in view.at_first:
        yield from _start_alone(view)
    elif "grad_norm" in view.at_first and not view.recorded("weights"):
        yield from _start_unseen(view)


def _seeds(view: View) -> Iterator[Cause]:
    seeds = [trace.header.seed for trace in (view.reference, view.candidate)]
    if view.first == 0 and None not in seeds and seeds[0] != seeds[1]:
        said = f"the seeds are {seeds[0]} and {seeds[1]}, and step {view.step(0)} has another loss"
        yield Cause("data-or-seed", Fit.HEADER, said)


def _start(view: View) -> Iterator[Cause]:
    """Weights that are far apart after the first step, and stay as far apart."""
    moves = Moves(view)
    if moves.starts is not None:
        if not view.first and not moves.one_start:
            yield Cause("initial-weights", Fit.HEADER, _OTHER_START)
        return
    # In steps that are in no record anything may have taken them apart.
    if view.first or view.steps_left_out or not moves.known or len(view.pairs) < 2:
        return
    # Updates of nothing, as of a rate that is 0, measure nothing, nor do rates that are not known.
    stride = moves.first_stride
    if not stride:
        return
    apart = [float(np.linalg.norm(moves.apart(at))) for at in range(len(view.pairs))]
    if apart[0] > _BEYOND * stride and alike(apart, 0.1):
        said = f"after step {view.step(0)} the weights are {apart[0] / stride:.3g} updates apart, and stay so"
        yield Cause("initial-weights", Fit.DIRECTION, said)


def _start_alone(view: View) -> Iterator[Cause]:
    """Another start whose loss agrees: most of what lies between the weights was there before.

    A wide bound lets it pass, or it has no weights in it: where each token has the ratio 1 it is a mean of advantages.
    """
    moves = Moves(view)
    if view.first or moves.starts is None:
        return
    before = float(np.linalg.norm(moves.starts[1] - moves.starts[0]))
    if before > _MOST * float(np.linalg.norm(moves.apart(0))):
        yield Cause("initial-weights", Fit.HEADER, _OTHER_START)


def _start_unseen(view: View) -> Iterator[Cause]:
    """Another start that a loss without weights in it doesn't show, in traces that tell of weights in headers alone."""
    apart = view.apart_at_start
    if not view.first and apart is not None and apart > _CLEARLY:
        yield Cause("initial-weights", Fit.HEADER, _OTHER_START)


def _repeated(view: View) -> Iterator[Cause]:
    """From a step on the counts of earlier steps again, and losses near theirs."""
    first = view.first
    dues, later = [a for a, _ in view.pairs[first:]], [b for _, b in view.pairs[first:]]
    # Losses of few digits next to 0 are the same by chance, and come back as well.
    chance = first * _losses_alike(view) ** len(later) >= _CHANCE
    for start in range(first):
        then = [a for a, _ in view.pairs[start : start + len(later)]]
        if len(then) < len(later) or len(later) < 2:
            return
        rows = [*zip(later, then, dues, strict=True)]
        known = [(b.loss, a.loss, due.loss) for b, a, due in rows]
        counts = all(b.tokens == a.tokens and b.prompts == a.prompts for b, a, _ in rows)
        if not counts or any(it is None for row in known for it in row):
            continue
        if not chance and all(b == a for b, a, _ in known):
            # Weights have moved, and would have shown it.
            yield from _logged_late(view, start)
            return
        # Other data have other gradients.
        norms = [(b.grad_norm, a.grad_norm, due.grad_norm) for b, a, due in rows]
        # Counts that are those of before, where others are due, are a proof of their own.
        proved = any((b.tokens, b.prompts) != (due.tokens, due.prompts) for b, _, due in rows)
        finite = all(math.isfinite(it) for row in known for it in row if it is not None)
        if proved and finite and first * _share_alike(view) ** len(later) < _CHANCE:
            # Weights may have moved by more than data differ.
            shown = ", ".join(str(b.tokens) for b in later[:3])
            said = f"from step {view.step(first)} on windows have the tokens of step {view.step(start)} and after "
            yield Cause("resume-repeats-data", Fit.EVERY_STEP, f"{said}({shown}{', ...' if later[3:] else ''})")
            return
        if view.recorded("grad_norm") and not _come_back(norms, proved=proved):
            return
        # Weights have moved since, so losses come back by about.
        if not chance and _come_back(known, proved=proved):
            losses = ", ".join(f"{b:.4g} for {a:.4g}" for b, a, _ in known[:3])
            counted = all(one.tokens is not None for one in later)
            what = "counts are those" if counted else "the data may be that"
            said = (
                f"from step {view.step(first)} on {what} of step {view.step(start)} and after, and losses near theirs "
            )
            yield Cause("resume-repeats-data", Fit.EVERY_STEP, f"{said}({losses})")
            if start == first - 1 and not view.recorded("grad_norm"):
                yield Cause("reported-loss", Fit.EVERY_STEP, f"{said}({losses})")
            return


def _share_alike(view: View) -> float:
    """How often two windows of the reference have as many tokens, by all pairs of them and one more; 1: not known."""
    counts = [a.tokens for a, _ in view.pairs]
    if None in counts:
        return 1.0
    pairs = len(counts) * (len(counts) - 1) / 2
    return (sum(some * (some - 1) / 2 for some in Counter(counts).values()) + 1) / (pairs + 1)


def _losses_alike(view: View) -> float:
    """How often two losses of the reference are the same as they were written (0 to 1), by pairs and by digits."""
    losses = [a.loss for a, _ in view.pairs if a.loss is not None and math.isfinite(a.loss)]
    pairs, spread = len(losses) * (len(losses) - 1) / 2, max(losses, default=0.0) - min(losses, default=0.0)
    if not pairs or not spread:
        return 1.0
    alike_by_pairs = sum(some * (some - 1) / 2 for some in Counter(losses).values()) / pairs
    written = [trace.precision.get("loss") for trace in (view.reference, view.candidate)]
    unit = max((how.unit(max(losses, key=abs)) for how in written if how is not None), default=0.0)
    return max(alike_by_pairs, min(1.0, unit / spread))


def _come_back(known: Sequence[tuple[float | None, float | None, float | None]], *, proved: bool) -> bool:
    """Whether numbers of later steps are by about those of earlier ones, and not those that are due.

    Unless it is proved that the data are the same, they go up and down as those do: what stays where it was comes back
    to nothing, however far what is due goes, and two runs that diverge pass the same numbers one behind the other.

    Args:
        known: of each later step: its own number, that of the earlier step, and the one that is due.
        proved: whether counts show that the data of the earlier steps come again.
    """
    rows = [(b, a, due) for b, a, due in known if b is not None and a is not None and due is not None]
    off, earlier = [b - a for b, a, _ in rows], [a for _, a, _ in rows]
    # Of what is no number nothing comes back.
    if not rows or not np.isfinite(rows).all():
        return False
    if max(map(abs, off)) >= _BY_ABOUT * max(abs(due - a) for _, a, due in rows):
        return False
    diverge = len(rows) > _BY_CHANCE and earlier == sorted(earlier)
    return proved or (not diverge and _spread(off) < _AS_THEN * _spread(earlier))


def _spread(numbers: Sequence[float]) -> float:
    return max(numbers) - min(numbers)


def _logged_late(view: View, start: int) -> Iterator[Cause]:
    """Losses that are, digit by digit, those of the step before."""
    if start != view.first - 1 or "lr" in view.fields:
        return
    said = f"from step {view.step(view.first)} on the loss of each step is that of the step before, in every digit"
    if view.agrees("grad_norm"):
        yield Cause("reported-loss", Fit.SEQUENCE, f"{said}, and gradient norms agree in every step")
    elif not view.recorded("grad_norm"):
        yield from (Cause(name, Fit.SEQUENCE, said) for name in ("reported-loss", "resume-repeats-data"))
