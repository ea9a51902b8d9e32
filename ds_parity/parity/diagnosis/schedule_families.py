"""Learning rates of common schedules: a warm-up to the highest rate, and a way down to a lowest one.

What a record shows of a schedule often leaves open which of its numbers is another: the first steps of a cosine are
those of another length, of another lowest rate, and of more moves in a step. Both sides are read as one kind of
schedule, in all ways in which they can be, and each number that may be another by itself is named.

The kinds are those of transformers.optimization (get_linear_schedule_with_warmup and those beside it) and of
deepspeed.runtime.lr_schedules (WarmupLR, WarmupDecayLR, WarmupCosineLR).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.rates import MOST
from ds_parity.parity.diagnosis.schedule_positions import is_often
from ds_parity.parity.diagnosis.schedule_shapes import digits
from ds_parity.parity.diagnosis.view import View, told

_FEW = 4  # rates, of which fewer are those of any schedule
_ROUNDED, _SINGLE = 1e-12, 1e-7  # of the highest rate
_TRIED = 24  # lowest rates between 0 and the lowest that is recorded
_ROUND = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 0.8, 0.9)
_THIRDS = 80
_WHOLE = 1e-6
_LONGEST = math.exp(64)  # steps of a warm-up; rates of unlike sizes would ask for one without end

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Kind:
    """A way down from 1 to 0.

    Attributes:
        words: what it is called.
        rate: where it is at a share of the way.
        place: the share of the way at which it is there.
    """

    words: str
    rate: Callable[[_Array], _Array]
    place: Callable[[_Array], _Array]


_KINDS = (
    _Kind("a line", lambda x: 1 - x, lambda y: 1 - y),
    _Kind("a cosine", lambda x: (1 + np.cos(np.pi * x)) / 2, lambda y: np.arccos(2 * y - 1) / np.pi),
    _Kind("a parabola", lambda x: (1 - x) ** 2, lambda y: 1 - np.sqrt(y)),
)


@dataclass(frozen=True)
class _Range:
    """Numbers between two of them, both among these."""

    least: float
    most: float

    def meets(self, other: _Range) -> bool:
        """Whether some number is in both."""
        return self.least <= other.most and other.least <= self.most

    def times(self, factor: float) -> _Range:
        """All of them, times a factor."""
        return _Range(self.least * factor, self.most * factor)

    def less(self, number: float) -> _Range:
        """All of them, less a number."""
        return _Range(self.least - number, self.most - number)


@dataclass(frozen=True)
class _Side:
    """The rates of a side, behind a warm-up.

    Attributes:
        steps: of the warm-up.
        highest: the rate to which it comes.
        places: behind the warm-up, in steps since the schedule began.
        rates: at these.
        slack: by how much a rate may be off.
    """

    steps: float
    highest: float
    places: _Array
    rates: _Array
    slack: float

    @property
    def least(self) -> float:
        """The lowest rate behind the warm-up."""
        return float(self.rates.min(initial=self.highest))

    def end(self, kind: _Kind, low: float) -> _Range | None:
        """Return in how many steps since the beginning it may come to a lowest rate; None where it doesn't."""
        lowest, highest = self._ends(kind, low)
        return _Range(lowest, highest) if lowest <= highest * (1 + _ROUNDED) else None

    def _ends(self, kind: _Kind, low: float) -> tuple[float, float]:
        span = self.highest - low
        if not span > self.slack:
            return math.inf, 0.0
        shares, within = (self.rates - low) / span, self.slack / span
        if (shares < -within).any() or (shares > 1 + within).any():
            return math.inf, 0.0
        way = self.places - self.steps
        with np.errstate(divide="ignore"):
            most = self.steps + way / kind.place(np.clip(shares + within, 0, 1))
            least = self.steps + way / kind.place(np.clip(shares - within, 0, 1))
        # At its lowest rate it has been for any number of steps.
        least[shares <= within] = self.steps
        return float(least.max(initial=self.steps)), float(most.min(initial=math.inf))

    def lowest(self, kind: _Kind, end: float) -> _Range | None:
        """Return to which lowest rates it may come in so many steps since the beginning; None where to none."""
        if not self.steps < end < math.inf:
            return None
        gone = 1 - kind.rate(np.clip((self.places - self.steps) / (end - self.steps), 0, 1))
        if (np.abs(self.rates - self.highest) > self.slack)[gone <= 0].any():
            return None
        rates, gone = self.rates[gone > 0], gone[gone > 0]
        low, within = self.highest - (self.highest - rates) / gone, self.slack / gone
        least, most = float((low - within).max(initial=0.0)), float((low + within).min(initial=self.highest))
        return _Range(least, most) if least <= most else None

    def lows(self, kind: _Kind) -> set[float]:
        """Return lowest rates to which it may come: round ones, some between, and the one that fits it best."""
        tried = {*np.linspace(0, self.least, _TRIED), *(share * self.highest for share in _ROUND)}
        found = {float(low) for low in tried if low <= self.least and self.end(kind, low) is not None}
        return found or {low for low in [self._best(kind)] if self.end(kind, low) is not None}

    def _best(self, kind: _Kind) -> float:
        """The lowest rate at which the ends that rates tell of lie nearest to one another, by thirds."""

        def apart(low: float) -> float:
            least, most = self._ends(kind, low)
            return least / most if most > 0 else math.inf

        low, high = 0.0, self.least
        for _ in range(_THIRDS):
            third = (high - low) / 3
            low, high = (low, high - third) if apart(low + third) < apart(high - third) else (low + third, high)
        return (low + high) / 2


def of_a_family(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """Yield what may be another number of a schedule whose kind both sides' rates are of.

    Args:
        view: two traces side by side; of an excerpt nothing is yielded, because it may have no warm-up in it.
        a: the reference's rates, of every common step.
        b: the candidate's.
    """
    highest = max(a)
    if view.is_excerpt or len(a) < _FEW or not highest > 0 or min(*a, *b) < 0:
        return
    slack = highest * (_SINGLE if _is_single([*a, *b]) else _ROUNDED) + 2 * digits(view, a, b)
    if max(b) > highest + slack or all(abs(x - y) <= 2 * slack for x, y in zip(a, b, strict=True)):
        return
    found: dict[str, str] = {}
    # A warm-up begins in its first step or in the one before, and what follows on its last step or on the one behind.
    for (before, late), rise in product(((0, 0), (1, 0), (1, 1)), (_line, _logarithm)):
        sides = [_side(np.array(rates), highest, (before, late), rise, slack) for rates in (a, b)]
        if sides[0] is None or sides[1] is None or not sides[0].steps < len(a) - 1 + before:
            continue
        for kind in _KINDS:
            for name, said in _of_a_kind(view, kind, sides[0], sides[1]):
                found.setdefault(name, said)
    yield from (Cause(name, Fit.SEQUENCE, said) for name, said in found.items())


def _line(place: _Array, steps: float) -> _Array:
    return place / steps


def _logarithm(place: _Array, steps: float) -> _Array:
    # deepspeed.runtime.lr_schedules, WarmupLR, 0.19.8: log(step + 1) / log(steps).
    return np.log(place + 1) / math.log(max(steps, 1 + _WHOLE))


def _steps(place: int, share: float, rise: Callable[[_Array, float], _Array]) -> float:
    """In how many steps a warm-up comes to its highest rate that is at a share of it in a place."""
    if rise is _line:
        return min(place / share, _LONGEST)
    return math.exp(min(math.log(place + 1) / share, math.log(_LONGEST)))


def _side(
    rates: _Array, highest: float, begins: tuple[int, int], rise: Callable[[_Array, float], _Array], slack: float
) -> _Side | None:
    """What a side is behind its warm-up; None where it begins with none of this kind.

    `begins`: how many steps before the first one the warm-up does, and how many behind its end the way down does.
    """
    before, late = begins
    places = np.arange(len(rates), dtype=np.float64) + before
    at_top = np.flatnonzero(np.abs(rates - highest) <= slack)
    # One that moves in larger steps passes its highest rate between two of them.
    passed = int(rates.argmax())
    top = int(at_top[0]) if len(at_top) else passed if passed < len(rates) - 1 else len(rates)
    steps = float(before)
    if top and places[top - 1]:
        share = float(rates[top - 1] / highest)
        if not 0 < share < 1:
            return None
        steps = _steps(int(places[top - 1]), share, rise)
        if abs(steps - round(steps)) * rates[top - 1] <= steps * slack + _WHOLE * rates[top - 1]:
            steps = float(round(steps))
    elif top:
        return None if rates[0] > slack or top == len(rates) else _Side(1.0, highest, places[2:], rates[2:], slack)
    rises = (places <= steps) & (steps > 0)
    if (np.abs(highest * rise(places[rises], steps) - rates[rises]) > slack).any():
        return None
    behind = places > steps + late
    if (np.abs(rates - highest) > slack)[(places >= steps) & ~behind].any():
        return None
    return _Side(steps, highest, places[behind] - late, rates[behind], slack)


def _of_a_kind(view: View, kind: _Kind, a: _Side, b: _Side) -> Iterator[tuple[str, str]]:
    """Names, and what says so, of numbers that are others in two schedules of one kind."""
    both = f"both sides go by {kind.words} from {a.highest:.4g} on"
    lows = a.lows(kind)
    if not lows:
        return
    for low in sorted(lows | b.lows(kind)):
        one, other = a.end(kind, low), b.end(kind, low)
        if one is None or other is None:
            continue
        if a.steps != b.steps:
            said = f"{both}, behind a warm-up of {told(a.steps)} and {told(b.steps)} steps"
            # Its length is a part of the schedule's, or lies in front of it.
            if _is_whole(b.steps) and (one.meets(other) or one.less(a.steps).meets(other.less(b.steps))):
                yield "another-warm-up", said
            # One of so many moves in a step need not come to its highest rate on a step.
            whole = b.steps > 0 and (_is_whole(b.steps) or _is_whole(a.steps / b.steps))
            if a.steps and whole and one.times(pace := b.steps / a.steps).meets(other):
                yield from ((name, said) for name in _of_pace(view, _Range(pace, pace)))
        elif not one.meets(other):
            paces = _Range(other.least / one.most, other.most / max(one.least, _WHOLE))
            said = f"{both}, and come to {low:.4g} after about {_about(one)} and {_about(other)} steps"
            yield from ((name, said) for name in _of_pace(view, paces, moves=a.steps == 0))
    if a.steps == b.steps:
        yield from _of_lows(kind, (a, b), lows, both)


def _of_lows(kind: _Kind, sides: tuple[_Side, _Side], lows: set[float], both: str) -> Iterator[tuple[str, str]]:
    """Another lowest rate to which both come in as many steps; `lows`: those to which the reference may."""
    a, b = sides
    for low in sorted(lows):
        ends = a.end(kind, low)
        if ends is None or ends.most == math.inf:
            continue
        for end in (ends.least, (ends.least + ends.most) / 2, ends.most):
            others = b.lowest(kind, end)
            if others is not None and not others.least <= low <= others.most:
                yield "another-lowest-lr", f"{both}, and come to {low:.4g} and to about {others.most:.4g} as soon"
                return


def _of_pace(view: View, paces: _Range, *, moves: bool = True) -> Iterator[str]:
    """The names of what takes so many times as many steps; `moves`: whether more moves in a step give it as well."""
    least, most = paces.least * (1 - _WHOLE), paces.most * (1 + _WHOLE)
    passes = {*view.passes} if all(view.passes) else set()
    if paces.most < 1:
        yield "schedule-too-short"
        times = {some for some in range(2, MOST) if moves and least <= 1 / some <= most}
        per_pass = bool(times & passes if passes else times) and len(passes) < 2
        if per_pass:
            yield "scheduler-per-pass"
        if is_often(view, times, per_pass=per_pass and bool(passes)):
            yield "scheduler-stepped-often"
    elif paces.least > 1:
        yield "schedule-too-long"
        if any(some > 1 and least <= some <= most for some in passes):
            yield "scheduler-budget-in-passes"


def _is_whole(number: float) -> bool:
    return abs(number - round(number)) <= _WHOLE * number


def _about(ends: _Range) -> str:
    return told(ends.least if ends.most == math.inf else (ends.least + ends.most) / 2)


def _is_single(rates: list[float]) -> bool:
    """Whether rates have no more than the digits of fp32."""
    known = np.array(rates)
    with np.errstate(over="ignore"):
        return np.array_equal(known.astype(np.float32).astype(np.float64), known)
