"""Learning rates of common schedules: a warm-up to the highest rate, and a way down to a lowest one.

What a record shows of a schedule often leaves open which of its numbers is another: the first steps of a cosine are
those of another length, of another lowest rate, and of more moves in a step. Both sides are read as one kind of
schedule, in all ways in which they can be, and each number that may be another by itself is named.

The kinds are a line, a cosine and a parabola behind a warm-up from 0, which is a line or a logarithm: those of
transformers.optimization (get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup, and
get_polynomial_decay_schedule_with_warmup of power 2) and of deepspeed.runtime.lr_schedules (WarmupLR, WarmupDecayLR,
WarmupCosineLR).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.nearness import near, told
from ds_parity.parity.diagnosis.rates import MOST
from ds_parity.parity.diagnosis.schedule_positions import is_often
from ds_parity.parity.diagnosis.schedule_shapes import digits_of_rates
from ds_parity.parity.diagnosis.view import View

_FEW = 4  # rates, of which fewer are those of any schedule
_ROUNDED, _SINGLE = 1e-12, 1e-7  # of the highest rate
_TRIED = 24  # lowest rates between 0 and the lowest that is recorded
_ROUND = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 0.8, 0.9)
_ROUNDS = 13  # in which lowest rates are tried, each within a twelfth of the range before: to the last digit
_MANY = 256  # rates, by which the lowest one is searched for
_MOVES = 4  # in a step, that are looked for where a warm-up begins within a step
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

    @property
    def holds_a_whole_number(self) -> bool:
        """Whether some number in it is a whole one, within rounding."""
        return math.floor(self.most * (1 + _WHOLE)) >= self.least * (1 - _WHOLE)

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
        slack: by how much each of these may be off.
        rests: its warm-up is one step at a rate of 0.
    """

    steps: float
    highest: float
    places: _Array
    rates: _Array
    slack: _Array
    rests: bool = False

    @property
    def least(self) -> float:
        """The lowest rate behind the warm-up."""
        return float(self.rates.min(initial=self.highest))

    @property
    def moved(self) -> int:
        """How many rates lie below the highest."""
        return int((self.highest - self.rates > self.slack).sum())

    def end(self, kind: _Kind, low: float) -> _Range | None:
        """Return in how many steps since the beginning it may come to a lowest rate; None where it doesn't."""
        return self.each_end(kind, [low])[0]

    def each_end(self, kind: _Kind, lows: list[float]) -> list[_Range | None]:
        """Return the same for each of some lowest rates."""
        least, most = self.ends(kind, np.array(lows))
        return [
            _Range(one, other) if one <= other * (1 + _ROUNDED) else None
            for one, other in zip(least.tolist(), most.tolist(), strict=True)
        ]

    def ends(self, kind: _Kind, lows: _Array) -> tuple[_Array, _Array]:
        """Return the least and the most steps in which it comes to each of some lowest rates.

        The least are more than the most where it doesn't, by as much as its rates tell of other ends.
        """
        if not len(self.rates):
            return np.full_like(lows, self.steps), np.full_like(lows, math.inf)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            span = (self.highest - lows)[:, None]
            shares, within = (self.rates - lows[:, None]) / span, self.slack / span
            none = (span[:, 0] <= self.slack.max()) | ((shares < -within) | (shares > 1 + within)).any(axis=1)
            way = self.places - self.steps
            most = self.steps + way / kind.place(np.clip(shares + within, 0, 1))
            # At its lowest rate it has been for any number of steps.
            least = np.where(
                shares <= within, self.steps, self.steps + way / kind.place(np.clip(shares - within, 0, 1))
            )
        return np.where(none, math.inf, least.max(axis=1)), np.where(none, 0.0, most.min(axis=1))

    def lowest(self, kind: _Kind, end: float) -> _Range | None:
        """Return to which lowest rates it may come in so many steps since the beginning; None where to none."""
        if not self.steps < end < math.inf:
            return None
        gone = 1 - kind.rate(np.clip((self.places - self.steps) / (end - self.steps), 0, 1))
        if (np.abs(self.rates - self.highest) > self.slack)[gone <= 0].any():
            return None
        rates, slack, gone = self.rates[gone > 0], self.slack[gone > 0], gone[gone > 0]
        low, within = self.highest - (self.highest - rates) / gone, slack / gone
        least, most = float((low - within).max(initial=0.0)), float((low + within).min(initial=self.highest))
        return _Range(least, most) if least <= most else None

    def lows(self, kind: _Kind) -> set[float]:
        """Return lowest rates to which it may come: round ones, some between, and the one that fits it best."""
        tried = np.array([*np.linspace(0, self.least, _TRIED), *(share * self.highest for share in _ROUND)])
        found = self._possible(kind, tried[tried <= self.least])
        return found or self._possible(kind, np.array([*self._best(kind)]))

    def _possible(self, kind: _Kind, lows: _Array) -> set[float]:
        least, most = self.ends(kind, lows)
        return {float(low) for low in lows[least <= most * (1 + _ROUNDED)]}

    def _best(self, kind: _Kind) -> set[float]:
        """The lowest rate at which the ends that rates tell of lie nearest to one another."""
        few = self.thinned

        def around(lows: _Array) -> tuple[int, int]:
            least, most = few.ends(kind, lows)
            with np.errstate(divide="ignore", invalid="ignore"):
                at = int(np.where(most > 0, least / most, math.inf).argmin())
            return max(at - 1, 0), min(at + 1, len(lows) - 1)

        return _narrowed(0.0, self.least, around)

    @property
    def thinned(self) -> _Side:
        """The same with few of its rates, the last one among them."""
        if len(self.rates) <= _MANY:
            return self
        kept = np.linspace(0, len(self.rates) - 1, _MANY).astype(int)
        return replace(self, places=self.places[kept], rates=self.rates[kept], slack=self.slack[kept])


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
    sides = (np.array(a), np.array(b))
    written = np.split(np.array(digits_of_rates(view, a, b, [*a, *b])), [len(a)])
    # What is computed of the highest rate is off by a share of its last digit, too.
    of_highest = written[0].max() + highest * (_SINGLE if _is_single(sides[0]) else 0.0)
    slacks = [
        highest * (_SINGLE if _is_single(rates) else _ROUNDED) + digits + of_highest * rates / highest
        for rates, digits in zip(sides, written, strict=True)
    ]
    if max(b) > highest + max(slacks[1]) or (np.abs(sides[0] - sides[1]) <= 2 * slacks[0]).all():
        return
    found: dict[str, str] = {}
    # A warm-up begins in its first step or in the one before, and what follows on its last step or on the one behind.
    for (before, late), rise in product(((0, 0), (1, 0), (1, 1)), (_line, _logarithm)):
        one = _side(sides[0], highest, (before, late), rise, slacks[0])
        if one is None or not one.steps < len(a) - 1 + before:
            continue
        # Of so many moves in a step, what lies before the first one is a part of a step.
        others = {
            moves: _side(sides[1], highest, (before / moves, late / moves), rise, slacks[1])
            for moves in range(1, _MOVES + 1 if before else 2)
        }
        for kind in _KINDS if any(others.values()) else ():
            lows = one.lows(kind)
            for moves, other in others.items():
                if other is not None and lows:
                    for name, said in _of_a_kind(view, kind, (one, other), lows, moves):
                        found.setdefault(name, said)
    yield from (Cause(name, Fit.SEQUENCE, said) for name, said in found.items())


def _line(place: _Array, steps: float) -> _Array:
    return place / steps


def _logarithm(place: _Array, steps: float) -> _Array:
    # deepspeed.runtime.lr_schedules, WarmupLR, 0.19.8: log(step + 1) / log(steps).
    return np.minimum(np.log(place + 1) / math.log(max(steps, 1 + _WHOLE)), 1.0)


def _steps(place: float, share: float, rise: Callable[[_Array, float], _Array]) -> float:
    """In how many steps a warm-up comes to its highest rate that is at a share of it in a place."""
    if rise is _line:
        return min(place / share, _LONGEST)
    return math.exp(min(math.log(place + 1) / share, math.log(_LONGEST)))


def _side(
    rates: _Array, highest: float, begins: tuple[float, float], rise: Callable[[_Array, float], _Array], slack: _Array
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
    # With one step of a warm-up in front of a way down that is a step late, two rates are the highest.
    steps = float(before - (late and not top and rates[1] < highest - slack[1]))
    if top and places[top - 1]:
        share = float(rates[top - 1] / highest)
        if not 0 < share < 1:
            return None
        steps = _steps(float(places[top - 1]), share, rise)
        if abs(steps - round(steps)) * rates[top - 1] <= steps * slack[top - 1] + _WHOLE * rates[top - 1]:
            steps = float(round(steps))
    elif before and rates[0] < highest - slack[0]:
        # None at all, and the record begins a step behind the highest rate.
        return None if late else _Side(0.0, highest, places, rates, slack)
    elif top:
        rests = rates[0] <= slack[0] and top < len(rates)
        return _Side(1.0, highest, places[2:], rates[2:], slack[2:], rests=True) if rests else None
    rises = (places <= steps) & (steps > 0)
    if (np.abs(highest * rise(places[rises], steps) - rates[rises]) > slack[rises]).any():
        return None
    behind = places > steps + late
    if (np.abs(rates - highest) > slack)[(places >= steps) & ~behind].any():
        return None
    return _Side(steps, highest, places[behind] - late, rates[behind], slack[behind])


def _of_a_kind(
    view: View, kind: _Kind, sides: tuple[_Side, _Side], lows: set[float], moves: int
) -> Iterator[tuple[str, str]]:
    """Names, and what says so, of numbers that are others in two schedules of one kind.

    `lows`: lowest rates to which the reference may come.
    `moves`: in how many parts of a step the candidate's warm-up begins, if it begins within one; else 1.
    """
    a, b = sides
    both = f"both sides go by {kind.words} from {a.highest:.4g} on"
    if a.steps != b.steps:
        said = f"{both}, behind a warm-up of {told(a.steps)} and {told(b.steps)} steps"
        own = lows | b.lows(kind)
        for low, one, other in _both_ends(kind, a, b, own | _common(kind, a, b)):
            # Two lines come to some rate together, whatever they are: a schedule ends with a step.
            if one is not None and other is not None and (low in own or one.holds_a_whole_number):
                yield from ((name, said) for name in _of_warm_ups(view, sides, (one, other), moves))
    # Any few rates are of every kind, and of rates that stand still no way down is seen.
    elif moves == 1 and a.moved > 2 and b.moved > 0:
        for low, one, other in _both_ends(kind, a, b, lows | b.lows(kind)):
            if one is not None and other is not None and not one.meets(other) and a.steps + 2 <= other.most:
                paces = _Range(other.least / one.most, other.most / max(one.least, _WHOLE))
                said = f"{both}, and come to {low:.4g} after about {_about(one)} and {_about(other)} steps"
                yield from ((name, said) for name in _of_pace(view, paces, moves=a.steps == 0))
        yield from _of_lows(kind, sides, lows, both)


def _of_warm_ups(view: View, sides: tuple[_Side, _Side], ends: tuple[_Range, _Range], moves: int) -> Iterator[str]:
    """The names of what makes a warm-up another; `ends`: in how many steps both come to one lowest rate."""
    (a, b), (one, other) = sides, ends
    # Its length is a part of the schedule's, or lies in front of it. One of a step is as well none, unless it rests.
    before = one.less(a.steps).meets(other.less(b.steps))
    seen = max(a.steps, b.steps) > 1 or a.rests != b.rests
    if moves == 1 and seen and _is_whole(b.steps) and (before or one.meets(other)):
        yield "another-warm-up"
        # Without one it is as many steps ahead.
        if before and not b.steps:
            yield "schedule-off-by-steps"
    # One of so many moves in a step need not come to its highest rate on a step.
    pace = b.steps / a.steps if a.steps else 0.0
    whole = b.steps > 0 and (_is_whole(b.steps) or _is_whole(a.steps / b.steps))
    if pace and whole and (moves == 1 or near(1 / pace, moves, _WHOLE)) and one.times(pace).meets(other):
        yield from _of_pace(view, _Range(pace, pace))


def _both_ends(
    kind: _Kind, a: _Side, b: _Side, lows: set[float]
) -> Iterator[tuple[float, _Range | None, _Range | None]]:
    """Each lowest rate, from the lowest on, and in how many steps each side may come to it."""
    ordered = sorted(lows)
    return zip(ordered, a.each_end(kind, ordered), b.each_end(kind, ordered), strict=True)


def _common(kind: _Kind, a: _Side, b: _Side) -> set[float]:
    """The lowest rate to which both come in as many steps, if there is one, where each may come to many."""
    few = (a.thinned, b.thinned)

    def turn(lows: _Array) -> tuple[int, int] | None:
        of_a, of_b = (np.add(*side.ends(kind, lows)) for side in few)
        # Where a way down ends at once or never, the one of the other side is no other.
        with np.errstate(invalid="ignore"):
            signs = np.sign(of_b - of_a)
        turns = np.flatnonzero(signs[:-1] * signs[1:] < 0)
        return (int(turns[0]), int(turns[0]) + 1) if len(turns) else None

    return _narrowed(0.0, min(a.least, b.least) * (1 - _WHOLE), turn)


def _narrowed(low: float, high: float, between: Callable[[_Array], tuple[int, int] | None]) -> set[float]:
    """The number that lies, each time, between two of some; none where `between` finds no two from the start on."""
    found: set[float] = set()
    for _ in range(_ROUNDS):
        tried = np.linspace(low, high, _TRIED)
        places = between(tried)
        if places is None:
            break
        low, high = (float(tried[at]) for at in places)
        found = {(low + high) / 2}
    return found


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


def _is_single(rates: _Array) -> bool:
    """Whether rates have no more than the digits of fp32."""
    with np.errstate(over="ignore"):
        return np.array_equal(rates.astype(np.float32).astype(np.float64), rates)
