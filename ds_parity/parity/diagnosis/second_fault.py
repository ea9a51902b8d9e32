"""A wrong logged rate and another fault behind it: what the steps show in which the rate alone differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from ds_parity.parity.comparison.bounds import EPS, C
from ds_parity.parity.diagnosis.moves import Moves, along
from ds_parity.parity.diagnosis.nearness import alike, told
from ds_parity.parity.diagnosis.rates import SAME
from ds_parity.parity.diagnosis.schedule_shapes import digits
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import StepRecord, Trace

# Of what rates do: gradients of other rows have another direction, and show a hundredth of it.
_OF_OTHER_ROWS = 0.01
_WORDS = {"loss": "loss", "grad_norm": "gradient norm"}
# Of the weights a sketch is known: a tenth of what a rate changes in an update tells another one.
_TELLING, _ALIGNED = 0.1, 0.15
_CLEAR = 10.0
_STEPS = 3


def proves(view: View) -> bool:
    """Return whether the record proves that the learning rates were the same, of whichever step those are that it says.

    A loop may log the rate that its scheduler has set for the next step. So the last rate of a record alone proves
    nothing, nor does one that the step behind it would have used, which was skipped.

    Args:
        view: two traces side by side.
    """
    if not view.updated_alike:
        return False
    later = view.of(*(_a_step_later(trace, view) for trace in (view.reference, view.candidate)))
    return "lr" in later.fields and later.updated_alike


def _a_step_later(trace: Trace, view: View) -> Trace:
    """A trace in which each step has the rate that the step before it logs, and the first one the reference's own."""
    side, pairs = int(trace is view.candidate), view.pairs
    rates = {pairs[0][0].step: pairs[0][0].lr}
    rates |= {b.step: before[side].lr for before, (_, b) in pairwise(pairs)}
    return replace(trace, steps=tuple(it.model_copy(update={"lr": rates.get(it.step)}) for it in trace.steps))


def not_by_the_rate(view: View) -> str:
    """Return what the rate of the first step that differs leaves unexplained in this step, in words; "" for nothing.

    Args:
        view: two traces side by side, whose learning rates differ in this step.
    """
    step = view.step(view.first)
    before = [words for name, words in _WORDS.items() if name in view.at_first]
    if before:
        return f"no rate of step {step} changes its {' and its '.join(before)}"
    moves, (a, b) = Moves(view), view.pairs[view.first]
    if not moves.known or not a.lr or not b.lr or len(a.lr) != len(b.lr) or a.skipped or b.skipped:
        return ""
    if moves.update(view.first) is None:
        # Where the weights began is not known. That both sides' began alike and moved alike shows in their checksums.
        moved = _by_rates(view, moves, max(abs(y - x) for x, y in zip(a.lr, b.lr, strict=True)))
        equal = moved and a.weights is not None and b.weights is not None and a.weights.checksum == b.weights.checksum
        return f"the weights of step {step} are equal, and other rates would move them apart" if equal else ""
    if any(a.lr):
        # Parameter groups whose rates are off by other factors turn the update.
        by_one = all(a.lr) and alike([y / x for x, y in zip(a.lr, b.lr, strict=True)], SAME)
        return _of_another_length(view, moves, a.lr[0], b.lr[0]) if by_one else ""
    if not _stands_still(view, moves):
        return ""
    return f"the weights of step {step} stay where they are, and a rate of {b.lr[0]:.4g} would move them"


def _of_another_length(view: View, moves: Moves, due: float, rate: float) -> str:
    """Whether the update of the first step is not so many times as long as the rate is: the step, in words."""
    at, times = view.first, rate / due
    update, widened = moves.update(at), moves.widened(at)
    if update is None or not update.any():
        return ""
    length, types = float(np.linalg.norm(update)), view.comparison.dtype
    # What both sides may lie apart by without a fault, and by the digits of the rates.
    added_up = C[types]["weights"] * EPS[types] * float(np.sqrt(view.pairs[at][0].rollouts or 1)) * max(1.0, times)
    of_group, of_other = ([one.lr[0] for one in side if one.lr] for side in zip(*view.pairs, strict=True))
    written = 2 * digits(view, of_group, of_other, max(due, rate)) / due
    if not float(np.linalg.norm(widened - (times - 1) * update)) > max(
        moves.rounding(at, times), (added_up + written) * length
    ):
        return ""
    (share,), rest = along(widened, [update])
    if rest < _ALIGNED and abs(share - (times - 1)) < _TELLING * abs(times - 1):
        return ""
    return f"the weights of step {view.step(at)} are not those of an update that is {told(times)} times as long"


def _stands_still(view: View, moves: Moves) -> bool:
    """Whether the candidate's weights stay in the first step, whose rate would move them as the others' do."""
    at, rate = view.first, (view.pairs[view.first][1].lr or (0.0,))[0]
    update = moves.update(at)
    due = _by_rates(view, moves, rate)
    if update is None or not due:
        return False
    return float(np.linalg.norm(moves.widened(at) + update)) < _TELLING * due


def _by_rates(view: View, moves: Moves, rate: float) -> float:
    """How far such a rate moves the weights in the first step that differs, by the other steps; 0 where it isn't clear.

    That is where no other step tells, the gradient is 0, or the numbers of the weights are rounded by nearly as much.
    """
    at = view.first
    others = [
        float(np.linalg.norm(one)) / a.lr[0]
        for n, (a, _) in enumerate(view.pairs)
        if n != at and a.lr and a.lr[0] and not a.skipped and (one := moves.update(n)) is not None
    ]
    due = rate * float(np.median(others)) if others and view.pairs[at][1].grad_norm != 0.0 else 0.0
    return due if due > _CLEAR * moves.rounding(at, 1.0) else 0.0


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
    # Each of these steps shows the rates of those before, also if later ones take weights back, and the next step its
    # own, too; unless the log is of the rates that the schedulers had set for the next step.
    readings = [(max(map(abs, accumulate(used[:-1])), default=0.0), sum(map(abs, used))) for used in (off, off[:-1])]
    for name, words in _WORDS.items():
        held = [_apart(view, name, pair) for pair in view.pairs[view.first + 1 : at + 1]]
        known = [it for it in held if it is not None]
        if len(known) == len(held) > 1:
            *before, last = known
            if all(shown and _OF_OTHER_ROWS * last * shown > max(before) * then for shown, then in readings):
                return f"in step {view.step(at)} its {words} parts at once, which other rates had not moved before"
    if _equal_in_every_digit(view.pairs[view.first + 1 : at]):
        return f"what other rates would have moved is equal in every digit up to step {alone.step(-1)}"
    return ""


def _equal_in_every_digit(pairs: Sequence[tuple[StepRecord, StepRecord]]) -> bool:
    """Whether losses and norms of some steps are equal, as far as they are recorded, and each step's are others."""
    kept = [[(getattr(a, name), getattr(b, name)) for a, b in pairs] for name in _WORDS]
    known = [of_name for of_name in kept if all(None not in pair for pair in of_name)]
    same = all(x == y for of_name in known for x, y in of_name)
    return same and any(len({x for x, _ in of_name}) == len(pairs) >= _STEPS for of_name in known)


def norms_stay(view: View) -> str:
    """Return that gradient norms are much nearer than losses, which other weights would take apart alike; "" if not."""
    if "loss" not in view.fields or not view.agrees("grad_norm"):
        return ""
    apart = {}
    for name in _WORDS:
        pairs = [pair for pair in view.pairs if not any(one.skipped for one in pair)]
        greatest = max((abs(getattr(a, name) or 0.0) for a, _ in pairs), default=0.0)
        held = [_apart(view, name, pair) for pair in pairs]
        if not greatest or None in held or len({getattr(a, name) for a, _ in pairs}) < len(pairs):
            return ""
        apart[name] = max(it for it in held if it is not None) / greatest
    near = apart["grad_norm"] < _OF_OTHER_ROWS * apart["loss"]
    return "the gradient norms of every step agree much more closely than the losses" if near else ""


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
