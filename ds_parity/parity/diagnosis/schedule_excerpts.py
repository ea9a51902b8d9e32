"""What learning rates leave open where a part of the schedule is recorded: how it came there, or how far it rises.

What a schedule did before may leave a factor in all of its rates. Behind another warm-up a line to 0 is another line to
0; a power of the steps, such as an inverse square root, is so many times itself at another pace; an exponential one is
at another step; and a schedule that rests may do so for any reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ds_parity.parity.diagnosis.nearness import alike, near
from ds_parity.parity.diagnosis.rates import MOST, SAME, rests_within, same
from ds_parity.parity.diagnosis.view import View

_BEFORE = ("another-warm-up",)
_PLACE = ("schedule-off-by-steps", "resume-resets-schedule")  # which may have begun anew in front of an excerpt
_FASTER = ("scheduler-stepped-often", "schedule-too-short")
_SLOWER = ("schedule-too-long", "scheduler-per-outer-step")
_ROUNDED = 1e-7  # rates in fp32, or written in seven digits
# One over the powers that are looked for: no schedule is steeper, and none that is flatter is told from exponential.
_INVERSE_POWERS = np.concatenate([-np.geomspace(4, 0.1, 40), np.geomspace(0.1, 4, 40)])
_HALVINGS = 60
_LEAST = 1e-12  # of the highest rate: what is less is nothing, and its powers are not finite
_CLEAR = 10  # times as far as rounding rates move
_WHOLE = 1e-3
_ABOUT = 0.25  # steps by which the beginning of a curve is known, and a thousandth of those since
_SKIPPED = 3


def not_seen(view: View) -> str:
    """Return in words which part of the schedule is not recorded."""
    if view.is_excerpt:
        return f"the schedule before step {view.step(0)} is not recorded"
    return "the record ends within the schedule"


def beside_a_factor(view: View, a: Sequence[float], factor: float) -> tuple[str, ...]:
    """Return what else than another base rate leaves a factor in all rates.

    Args:
        view: two traces side by side.
        a: the reference's rates of a parameter group, of every common step.
        factor: the candidate's in those.

    Returns:
        Names of causes; none where each leaves other rates.
    """
    levels = _levels(a)
    # One rest a skipped step may have left; with more of them a schedule goes by stairs.
    moving = levels if len(rests_within(a)) < 2 else []
    power, of_logarithms = _power_of(moving), _is_logarithm(moving, view)
    begun = power if power is not None and power.begins(view.step(0)) else None
    if not view.is_excerpt:
        # Nor is it seen to which rate a warm-up comes that goes on at the end of the record.
        rises = a[-1] > a[-2] and sorted(a) == [*a] and (of_logarithms or begun is not None or len(moving) == 2)
        often = begun is not None and begun.is_root_moved_often(factor)
        return (*(_BEFORE if rises else ()), *(of_many_moves(view) if often else ()))
    if len(levels) == 1:
        return ("no-scheduler", "another-lowest-lr", *_BEFORE, *of_many_moves(view), *_slower(view), *_PLACE)
    found: list[str] = []
    if alike([y / x for x, y in pairwise(levels) if x], SAME):  # exponential, by steps or by stairs
        found += [*_BEFORE, *_PLACE]
    if power is not None or of_logarithms:
        found += _BEFORE
    # At another pace a power that begins with the run is so many times itself. Two rates may be of any curve.
    if len(levels) == 2 or begun is not None:
        found += of_many_moves(view) if (factor > 1) == (levels[1] > levels[0]) else _slower(view)
    return tuple(dict.fromkeys(found))


def beside_a_rest(view: View, a: Sequence[float], rate: float) -> tuple[str, ...]:
    """Return what else than no scheduler leaves one rate in all steps of an excerpt, in which the reference moves.

    A schedule that is over does, one that has not left its first rates, and one that is in the middle of a rest.

    Args:
        view: two traces side by side.
        a: the reference's rates, of every common step.
        rate: the candidate's, in all of them.

    Returns:
        Names of causes; none in a whole record.
    """
    if not view.is_excerpt:
        return ()
    rises, falls = sorted(a) == [*a], sorted(a, reverse=True) == [*a]
    over = rate <= min(a) or not falls
    waits = rate > min(a) or not (rises or falls)
    found = [*(of_many_moves(view) if over else ()), *(("another-lowest-lr", *_slower(view)) if waits else ())]
    # Within a warm-up, too, a scheduler stands still that moves once in so many steps.
    return tuple(dict.fromkeys((*found, "scheduler-per-outer-step", *_PLACE)))


def of_many_moves(view: View) -> tuple[str, ...]:
    """Return the names of what brings a schedule to a later place in every step."""
    return (*(("scheduler-per-pass",) if max(view.passes) != 1 else ()), *_FASTER)


def _slower(view: View) -> tuple[str, ...]:
    return (*_SLOWER, *(("scheduler-budget-in-passes",) if max(view.passes) != 1 else ()))


def _levels(a: Sequence[float]) -> list[float]:
    """The rates without those that are the same as the one before, give or take rounding."""
    return [rate for at, rate in enumerate(a) if not at or not same(rate, a[at - 1])]


def _is_logarithm(rates: Sequence[float], view: View) -> bool:
    """Whether rates are so many times the logarithm of the steps, as in DeepSpeed's WarmupLR.

    Steps that were skipped in front of an excerpt are not counted by it.
    """
    for begun in range(-_SKIPPED if view.is_excerpt else 0, 2):
        steps = range(view.step(0) + begun, view.step(0) + begun + len(rates))
        times = [rate / math.log(step) for step, rate in zip(steps, rates, strict=True) if step > 1]
        nothing = (rate for step, rate in zip(steps, rates, strict=True) if step <= 1)
        if len(times) > 1 and alike(times, SAME) and not any(nothing):
            return True
    return False


@dataclass(frozen=True)
class _Power:
    """Rates that are a power of a line over the steps.

    Attributes:
        inverse: one over the power.
        first: where the line is in the first step.
        move: by how much it moves in a step.
    """

    inverse: float
    first: float
    move: float

    def begins(self, step: int) -> bool:
        """Whether the line is 0 about where the run begins; `step`: of the first rate.

        A schedule is there in its first step, or in the one before, and behind where skipped steps have left it.
        """
        behind = step - self.first / self.move
        play = _ABOUT + step / 1000
        return -play < behind < _SKIPPED + play

    def is_root_moved_often(self, factor: float) -> bool:
        """Whether an inverse root that begins with the run is so many times itself for a whole number of moves."""
        if not self.inverse < 0 < factor:
            return False
        logarithm = self.inverse * math.log(factor)
        moves = math.exp(logarithm) if 0 < logarithm < math.log(MOST) else 0.0
        return moves > 1 and near(moves, round(moves), _WHOLE)


def _power_of(rates: list[float]) -> _Power | None:
    """The power of a line that rates are; None where they are none. Of three rates there nearly always is one."""
    a = np.array(rates)
    known = a > a.max(initial=0.0) * _LEAST  # a line ends at 0, and one that rises may begin there
    if known.sum() < 3 or not known[1:-1].all() or np.ptp(a) < _CLEAR * _ROUNDED * a.max():
        return None
    steps = np.flatnonzero(known)
    a = a[known] / a.max()
    middle = len(a) // 2
    share = (steps[middle] - steps[0]) / (steps[-1] - steps[0])

    def bend(inverse: float) -> float:
        first, at, last = (a[[0, middle, -1]] / a[middle]) ** inverse
        return float((1 - share) * first + share * last - at) / inverse**2

    bends = [bend(it) for it in _INVERSE_POWERS]
    for low, high in ((x, y) for (x, f), (y, g) in pairwise(zip(_INVERSE_POWERS, bends, strict=True)) if f * g <= 0):
        if low * high < 0:
            continue
        inverse = _root(bend, float(low), float(high))
        line = a[0] ** inverse + (a[-1] ** inverse - a[0] ** inverse) * (steps - steps[0]) / (steps[-1] - steps[0])
        if (line > 0).all() and np.abs(line ** (1 / inverse) - a).max() <= SAME * np.ptp(a) + _ROUNDED:
            move = float(line[-1] - line[0]) / (steps[-1] - steps[0])
            return _Power(inverse, float(line[0]) - move * int(steps[0]), move)
    return None


def _root(of: Callable[[float], float], low: float, high: float) -> float:
    rises = of(high) > of(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if (of(middle) < 0) == rises else (low, middle)
    return (low + high) / 2
