"""Learning rates of a schedule of the reference's shape: a slower one, with another lowest rate or warm-up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise, product

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.nearness import near, told
from ds_parity.parity.diagnosis.rates import SAME, digits_of, rests_within, tells
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import Precision

# Of what the rates come to: what is read between two steps of a curve is not exact.
_BETWEEN = 1e-5
_ROUNDED = 1e-7  # rates in fp32
_WRITTEN = 4  # numbers that a predicted rate is computed of, each off by its last digit at most
_POINTS = 6
_SLOWEST = 1e3
_CLEAR = 10  # times what a prediction may be off by: a shape explains rates that are further apart
_TRIED = 4
_SHARES = (64, 32, 16, 8)
_ROUND = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 8.0, 10.0)

_At = Callable[[float], float]


def _straight(rates: list[float]) -> _At:
    """The rate at a place between steps, on the straight line from step to step; before the first one as after it."""

    def rate(place: float) -> float:
        at = min(max(math.floor(place), 0), len(rates) - 2)
        return rates[at] + (place - at) * (rates[at + 1] - rates[at])

    return rate


def _curved(rates: list[float]) -> _At:
    """The same on the curve through the nearest steps on this side of the highest rate."""
    top = max(rates)
    bends = [0, rates.index(top), len(rates) - 1 - rates[::-1].index(top), len(rates) - 1]

    def rate(place: float) -> float:
        at = min(max(math.floor(place), 0), len(rates) - 2)
        low, high = next((x, y) for x, y in pairwise(bends) if x <= at < y)
        start = max(low, min(at - _POINTS // 2 + 1, high + 1 - _POINTS))
        near_by = range(start, min(start + _POINTS, high + 1))
        # Lagrange's formula.
        return math.fsum(rates[i] * math.prod((place - j) / (i - j) for j in near_by if j != i) for i in near_by)

    return rate


def _held(rates: list[float]) -> _At:
    """The same where a schedule goes by whole steps."""
    return lambda place: rates[math.floor(place)]


def stretched(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """The reference's schedule at a slower pace, all of it or what comes behind a warm-up that both have."""
    of_roots = _pace_of_roots(view, a, b)
    pace = of_roots or _pace(a, b, max(view.passes))
    if pace is None:
        return
    passes = max(view.passes)
    said = f"the LR moves {told(pace)} times too slowly"
    if near(pace, passes, 1e-3):
        said += f"; windows have {passes} passes"
        yield Cause("scheduler-budget-in-passes", Fit.SEQUENCE, said)
    yield Cause("schedule-too-long", Fit.SEQUENCE, said)
    if of_roots:
        yield Cause("another-warm-up", Fit.SEQUENCE, said)
    # The highest rate of a line may lie in front of an excerpt, and from there on one that ends later ends higher.
    if view.is_excerpt and a[-1] < a[0] and _is_straight(a, 0.0):
        yield Cause("another-lowest-lr", Fit.SEQUENCE, said)
    # Rates that hold for several steps show it in these alone.
    gaps = {y.step - x.step for (x, _), (y, _) in pairwise(view.pairs)}
    if max(gaps, default=1) > 1 and near(pace, round(pace), SAME) and round(pace) <= min(gaps):
        yield Cause("scheduler-per-outer-step", Fit.SEQUENCE, said)


def _pace_of_roots(view: View, a: list[float], b: list[float]) -> float | None:
    """The same of an inverse square root behind a warm-up, whose length alone sets its pace; None where it is none."""
    written, top = _WRITTEN * digits(view, a, b), max(a)
    within = _within(a, SAME) + written
    if _unchanged(a, b, _within(a, SAME), written):
        return None
    for before in (0, 1):
        first = [rates[1 - before] for rates in (a, b)]
        if min(first) <= SAME * top:  # no warm-up is as long
            continue
        steps, slower = (max(1, round(top / rate)) for rate in first)
        due = ([_of_root(n + before, length, top) for n in range(len(a))] for length in (steps, slower))
        falls = len(a) + before - 1 - steps
        if slower > steps and falls > 2 and all(_all_due(x, y, within) for x, y in zip(due, (a, b), strict=True)):
            return slower / steps
    return None


def _of_root(place: int, steps: int, top: float) -> float:
    """The rate at a place: a line to the highest, and from there on its inverse square root."""
    return top * min(place / steps, math.sqrt(steps / max(1, place)))


def _pace(a: list[float], b: list[float], passes: int) -> float | None:
    """How many times slower the candidate goes through the reference's rates; None where it doesn't."""
    if len(a) < 3 or _unchanged(a, b, _within(a, SAME)):
        return None
    crossings = _crossings(a, b)
    paces = (
        pace
        for origin in _origins(a, b)
        if tells(b[max(origin, 0) :])
        for rate_at, within in ((_straight(a), _within(a, SAME)), (_curved(a), _within(a, _BETWEEN)))
        if not _unchanged(a, b, within)
        for pace in _paces(rate_at, origin, a, b, crossings, within)
        if pace > 1 + SAME and _is_known(a, origin, (len(b) - 1 - origin) / pace)
        if _slowed(rate_at, origin, b, pace, within)
    )
    # A schedule that goes down by steps stays where it is for long, whatever its pace.
    by_steps = a[1] == a[0] and 2 * sum(x != y for x, y in pairwise(a)) < len(a)
    tried = (float(passes), *_ROUND) if by_steps else ()
    held = (pace for pace in tried if pace > 1 and _slowed(_held(a), 0, b, pace, _within(a, SAME)))
    return next(chain(paces, held), None)


def _origins(a: list[float], b: list[float]) -> Iterator[int]:
    """Where both schedules stand at one place: at or before the start, or where they leave their first or highest."""
    yield from (0, -1)
    rest = next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != a[0] or y != a[0]), 0)
    if rest > 1:
        yield rest - 1
    tops = _tops(a)
    for at in dict.fromkeys((tops[0], tops[-1])):
        if at and all(near(y, x, SAME) for x, y in zip(a[: at + 1], b[: at + 1], strict=True)):
            yield at


def _tops(rates: list[float]) -> list[int]:
    """The steps at the highest rate; the end of a warm-up may be off from it by rounding."""
    top = max(rates)
    return [at for at, rate in enumerate(rates) if near(rate, top, _ROUNDED)] or [rates.index(top)]


def _crossings(a: list[float], b: list[float]) -> list[tuple[int, list[int]]]:
    """The last steps of the candidate that are no rest, and behind which ones the reference passes their rates."""
    moved = (at for at in range(len(b) - 1, 0, -1) if b[at] != b[at - 1])
    ups = [(at, min(pair), max(pair)) for at, pair in enumerate(pairwise(a)) if pair[0] != pair[1]]
    return [
        (step, [at for at, low, high in ups if low <= b[step] <= high and at < step]) for step in islice(moved, _TRIED)
    ]


def _paces(
    rate_at: _At, origin: int, a: list[float], b: list[float], crossings: list[tuple[int, list[int]]], within: float
) -> Iterator[float]:
    """Paces at which the reference's schedule comes to the last rates of the candidate that are no rest."""
    for step, places in crossings:
        for at in places[bisect_left(places, max(origin, 0)) :]:
            if step <= max(origin, 0) or not _may_pass(rate_at, origin, a, b, (step, at), within):
                continue
            place = _place(rate_at, at, b[step])
            if place > origin and (pace := (step - origin) / (place - origin)) < _SLOWEST:
                yield pace


def _may_pass(
    rate_at: _At, origin: int, a: list[float], b: list[float], crossing: tuple[int, int], within: float
) -> bool:
    """Whether the candidate's first steps allow that one of its last comes to a place between two of the reference.

    A place that is known to half a step there is known to a share of it at a share of the way, and the rate to twice
    what the reference moves in as much of the steps around it: what lies farther off needs no exact place.
    """
    step, at = crossing
    for share in _SHARES:
        way = (step - origin) // share
        if not way or origin + way < max(origin, 0):
            continue
        place = origin + way * (at + 0.5 - origin) / (step - origin)
        around = a[max(0, math.floor(place) - _POINTS // 2) : max(0, math.floor(place)) + _POINTS // 2 + 2]
        if abs(rate_at(place) - b[origin + way]) > within + 2 / share * (max(around) - min(around)):
            return False
    return True


def _place(rate_at: _At, at: int, rate: float) -> float:
    """Where between two steps a rate is reached."""
    low, high = float(at), float(at + 1)
    rising = rate_at(high) > rate_at(low)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (rate_at(middle) < rate) == rising else (low, middle)
    return (low + high) / 2


def _is_known(a: list[float], origin: int, way: float) -> bool:
    """Whether rates tell of so many steps behind the origin: what lies between two of them does on a line alone."""
    start = max(origin, 0)
    from_nothing = origin < 0 and abs(2 * a[0] - a[1]) <= _within(a, SAME)
    return way > start - origin + 1 - SAME or from_nothing or _is_straight(a[start : start + 3], 0.0)


def _slowed(rate_at: _At, origin: int, b: list[float], pace: float, within: float) -> bool:
    steps = range(max(origin, 0), len(b))
    return all(abs(rate_at(origin + (at - origin) / pace) - b[at]) <= within for at in steps)


def ends(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """The highest or the lowest rate of the reference, and all others a share as far from it."""
    # Behind a warm-up that both have, the rest alone has another lowest rate.
    rise = _tops(a)[-1]
    off = _digits_of_sides(view, a, b)
    written = _WRITTEN * max(off)
    if rise and all(near(y, x, SAME) for x, y in zip(a[: rise + 1], b[: rise + 1], strict=True)):
        a, b = a[rise:], b[rise:]
    within = _within(a, SAME)
    if _unchanged(a, b, within, written):
        return
    for end, word, others in ((max, "most", "lowest"), (min, "least", "highest")):
        kept = end(a)
        far, of_candidate = max(zip(a, b, strict=True), key=lambda pair: abs(pair[0] - kept))
        # From 0 on a share is a factor, which says so itself.
        if not tells(a) or not kept or (of_candidate - kept) * (far - kept) <= 0:
            continue
        share = (of_candidate - kept) / (far - kept)
        bounds = [within + min(it, written) for it in _left_open(a, (kept, far, of_candidate), off)]
        if all(abs(kept + share * (x - kept) - y) <= it for x, y, it in zip(a, b, bounds, strict=True)):
            said = f"the LR is at {word} {kept:.4g} in both, and {told(share)} times as far from it as the reference's "
            said += "in every step"
            # A lowest rate below 0 is none: the reference's lies as high as this, and no higher than it was recorded.
            if end is min or kept * (1 - 1 / share) <= min(a) + _within(a, _BETWEEN) + written:
                yield Cause(f"another-{others}-lr", Fit.SEQUENCE, said)
                # Behind another warm-up what is left of the way to the lowest rate is another share of it.
                if end is min and view.is_excerpt:
                    yield Cause("another-warm-up", Fit.SEQUENCE, said)
            # On a straight line another pace is as far.
            if end is max and _is_straight(a, written):
                name = "schedule-too-long" if share < 1 else "schedule-too-short"
                yield Cause(name, Fit.SEQUENCE, said)


def _left_open(a: list[float], ends: tuple[float, float, float], off: tuple[float, float]) -> list[float]:
    """By how much each rate may lie from a share of the way between two of the reference's, by the digits of all.

    With the share s and a rate at t of the way, what digits change of the rate is (1 - t)(1 - s) times what they change
    of the near end, t times what they do of the candidate's far end, s times what they do of the reference's rate, and
    s t times what they do of its far end. The share is that of the changed ends.

    Args:
        a: the reference's rates.
        ends: of the way, the near one first, and the candidate's rate where the reference is at the far one.
        off: by how much the reference's rates and the candidate's may be off.
    """
    kept, far, of_candidate = ends
    # Ends that digits don't part have no share between them.
    if abs(far - kept) <= 2 * off[0]:
        return [0.0] * len(a)
    corners = product((kept - off[0], kept + off[0]), (far - off[0], far + off[0]), (-off[1], off[1]))
    shares = [(of_candidate + by - near_end) / (far_end - near_end) for near_end, far_end, by in corners]
    least, most = max(min(shares), 0.0), max(shares)
    ways = [(x - kept) / (far - kept) for x in a]
    # Most is left open at one of the two shares that lie farthest apart.
    return [
        max(off[0] * ((1 - way) * abs(1 - it) + it * (1 + way)) for it in (least, most)) + off[1] * (1 + way)
        for way in ways
    ]


def digits(view: View, a: list[float], b: list[float], rate: float | None = None) -> float:
    """By how much a rate may be off by the digits in which both sides have written theirs; 0 where they are whole.

    Args:
        view: two traces side by side.
        a: the reference's rates of a parameter group.
        b: the candidate's.
        rate: the rate; by default the highest of the reference's.
    """
    most = max(a) if rate is None else rate
    return max((how.slack(most) for how in _rounded(view, a, b, most) if how is not None), default=0.0)


def digits_of_rates(view: View, a: list[float], b: list[float], rates: list[float]) -> list[float]:
    """The same for each of some rates: in so many significant digits a low rate is written more closely."""
    rounded = _rounded(view, a, b, max(a))
    return [max((how.slack(rate) for how in rounded if how is not None), default=0.0) for rate in rates]


def _digits_of_sides(view: View, a: list[float], b: list[float]) -> tuple[float, float]:
    """The same for the highest rate of the reference, by the digits of each side, the reference's first."""
    most = max(a)
    one, other = (0.0 if how is None else how.slack(most) for how in _rounded(view, a, b, most))
    return one, other


def _rounded(view: View, a: list[float], b: list[float], most: float) -> list[Precision | None]:
    """How the sides have written their rates, the reference's first; None of one that has not rounded them."""
    sides = ((view.reference.precision.get("lr"), a), (view.candidate.precision.get("lr"), b))
    return [how if how is not None and not _are_round(own, how.slack(most)) else None for how, own in sides]


def _are_round(rates: list[float], slack: float) -> bool:
    """Whether rates of few digits are no rounded ones: they move by one number, or by two that no rounding parts.

    Rates that stand still in several steps move by less than their last digit there.
    """
    rests = len(rests_within(rates)) > 1
    moves = [y - x for x, y in pairwise(rates)]
    while moves and not moves[-1]:
        moves.pop()
    moves = sorted(it for it in moves if rests or abs(it) > slack * SAME)
    apart = [y - x for x, y in pairwise(moves) if y - x > slack * SAME]
    return len(moves) > 1 and len(apart) < 2 and all(it > _CLEAR * slack for it in apart)


def _is_straight(rates: list[float], written: float) -> bool:
    moves = [y - x for x, y in pairwise(rates)]
    # A rest of the log, such as that of a step that was skipped, is no bend.
    moved = [it for it in moves if it]
    return 2 * len(moved) > len(moves) > 1 and max(moved) - min(moved) <= _within(rates, SAME) + written


def warm_up(a: list[float], b: list[float]) -> Iterator[Cause]:
    """The rise of the reference at another pace: to the rate at which it stays, or farther than one of both shows."""
    within = _within(a, SAME)
    rests = a[-1] == a[-2] and a[-1] >= max(a) - within
    top = a[-1] if rests else b[-1] if b[-1] == b[-2] else math.inf
    # What comes behind the highest rate is no rise; a candidate that is not that far does not tell of it.
    rise = a if rests or top < math.inf or max(b) > max(a) + within else a[: _tops(a)[0] + 1]
    # The reference rises no farther than the rate at which both come to rest.
    if a[0] == top or top < max(a) - within or min(len(a) - 1, len(rise)) < 2 or _unchanged(a, b, within):
        return
    # A line that rises in all steps may go on to any rate, and one of no step is there at once.
    if (rests or (_is_straight(a, 0.0) and a[0] < a[1])) and all(abs(y - top) <= within for y in b):
        said = f"the LR is {top:.4g} in every step, to which the reference's {'rises' if rests else 'may still rise'}"
        yield Cause("another-warm-up", Fit.SEQUENCE, said)
        return
    # A warm-up starts in its first step, or in the one before.
    for start, before in ((a[0], 0), (2 * a[0] - a[1], 1)):
        lines = ((it, _risen(start, before, top if it is b or rests else math.inf, it)) for it in (rise, b))
        if max(b) - within > start >= -within and all(_all_due(due, it, within) for it, due in lines):
            some = digits_of(*max(zip(a[:2], b[:2], strict=True), key=lambda pair: abs(pair[1] - pair[0])))
            others, due = (", ".join(f"{rate:.{some}g}" for rate in rates[:2]) for rates in (b, a))
            said = f"the LR rises from {others} on, and not from {due} on"
            said = f"{said}, to {top:.4g} in both" if rests else said
            yield Cause("another-warm-up", Fit.SEQUENCE, said)
            # The first rate alone is another: whatever it is, it lies as far from the highest as a lowest one sets it.
            if rests and all(abs(y - top) <= within for y in (*a[1:], *b[1:])):
                yield Cause("another-lowest-lr", Fit.SEQUENCE, said)
            return


def _risen(start: float, before: int, top: float, rates: list[float]) -> list[float]:
    """A line from a rate, so many steps before the first, to the highest; as steep as the first rates show."""
    at = 1 - before
    steps = max(rates[at] - start, 0.0)
    return [min(top, start + (n + before) * steps) for n in range(len(rates))]


def _within(rates: list[float], share: float) -> float:
    """How far off a rate may be that was predicted: a share of what the schedule moves, or rounding."""
    return share * (max(rates) - min(rates)) + _ROUNDED * max(rates)


def _unchanged(a: list[float], b: list[float], within: float, written: float = 0.0) -> bool:
    """Whether the reference's own rates predict the candidate's about as well as another shape of them could."""
    return _all_due(a, b, _CLEAR * within + written)


def _all_due(due: list[float], rates: list[float], within: float) -> bool:
    return all(abs(x - y) <= within for x, y in zip(due, rates, strict=True))
