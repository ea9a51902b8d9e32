"""Learning rates of a schedule that goes by stairs, as torch's StepLR: at another pace, or at another place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.nearness import alike, near
from ds_parity.parity.diagnosis.rates import SAME, follows, same
from ds_parity.parity.diagnosis.view import View

_DEEPEST = 300.0  # a power of e by which rates may lie apart, and still be numbers


@dataclass(frozen=True)
class Stairs:
    """A rate that rests for a number of steps, and is then the same factor off for as many.

    Attributes:
        top: the first rate.
        factor: of a stair to the one before.
        period: steps of a stair.
        late: steps by which the first stair is longer: DeepSpeed's schedulers begin with the rate of step 0 twice.

    A rate that moves in every step, as torch's ExponentialLR has it, goes by stairs of one step.
    """

    top: float
    factor: float
    period: int
    late: int = 0

    def at(self, step: int) -> float:
        """Return the rate of a step, counted from 0; in front of the first it is the first one's."""
        return float(self.top * self.factor ** max(0, (step - self.late) // self.period))

    def gives(self, rates: list[float], start: int) -> bool:
        """Whether rates from a step on are these."""
        return follows(map(self.at, range(start, start + len(rates))), rates)

    def stair(self, rate: float) -> int | None:
        """Return how many stairs behind the first one a rate is; None where it is that of no stair."""
        times = rate / self.top
        count = round(math.log(times) / math.log(self.factor)) if times > 0 else -1
        return count if count >= 0 and near(times, self.factor**count, SAME) else None


def stairs_of(view: View, rates: list[float]) -> Stairs | None:
    """Return the stairs by which rates go that move twice or more, by one factor and in even distances.

    Args:
        view: two traces side by side.
        rates: one side's, of every common step.
    """
    start, moved = view.step(0) - 1, _moved(rates)
    # Of steps that are left out it isn't known in which of them a rate moved.
    if len(moved) < 2 or min(rates) <= 0 or view.pairs[len(rates) - 1][0].step - start != len(rates):
        return None
    factors, periods = [rates[at] / rates[at - 1] for at in moved], {y - x for x, y in pairwise(moved)}
    period = min(periods)
    late = (start + moved[0]) % period if period > 1 else int(start == 0 and moved[0] > 1)
    before = (start + moved[0] - late) // period - 1
    deep = abs(math.log(factors[0])) * (start + 2 * len(rates)) / period
    if len(periods) > 1 or late > 1 or before < 0 or not alike(factors, SAME) or deep > _DEEPEST:
        return None
    found = Stairs(rates[0] / factors[0] ** before, factors[0], period, late)
    return found if found.gives(rates, start) else None


def by_stairs(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """Stairs of the reference of another length, or as many steps ahead or behind as the candidate's first move is."""
    stairs, start = stairs_of(view, a), view.step(0) - 1
    if stairs is None:
        return
    moved = _moved(b)
    if not moved:
        # A schedule that is behind by enough rests at its first rate: no step of the record tells by how much. Nothing
        # speaks for it where the reference rests nowhere.
        if same(b[0], stairs.top) and stairs.period > 1:
            said = f"the LR is {b[0]:.4g} in every step, at which the reference's rests for {stairs.period} steps"
            yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)
        return
    count, place = stairs.stair(b[moved[0]]), start + moved[0] - stairs.late
    if not count:
        return
    by = place - count * stairs.period
    if by and all(same(rate, stairs.at(start + at - by)) for at, rate in enumerate(b)):
        said = f"the LR is that of {abs(by)} steps {'earlier' if by > 0 else 'later'}"
        yield Cause("schedule-off-by-steps", Fit.SEQUENCE, f"{said}, and rests for {stairs.period} steps in both")
    period = place // count
    if place % count == 0 and period not in {0, stairs.period} and replace(stairs, period=period).gives(b, start):
        yield from _at_pace(view, stairs, period)


def _at_pace(view: View, stairs: Stairs, period: int) -> Iterator[Cause]:
    """What makes stairs longer or shorter; a scheduler that moves more or less often, if they are so many times that.

    With a first stair that is longer than the others, the reference's would have another length then.
    """
    rests = f"rests for {stairs.period}" if stairs.period > 1 else "moves in every step"
    said = f"the LR rests for {period} steps at a time, and the reference's {rests}"
    longer, times = period > stairs.period, max(period, stairs.period) // min(period, stairs.period)
    even = max(period, stairs.period) == times * min(period, stairs.period) and not stairs.late
    per_pass = even and set(view.passes) == {times}
    if per_pass:
        yield Cause("scheduler-budget-in-passes" if longer else "scheduler-per-pass", Fit.SEQUENCE, said)
    yield Cause("schedule-too-long" if longer else "schedule-too-short", Fit.SEQUENCE, said)
    if even and longer:
        yield Cause("scheduler-per-outer-step", Fit.SEQUENCE, f"{said}: it moves once in {times} steps")
    # Passes explain their number alone, but for two numbers that a scheduler is often stepped: twice, and once a rank.
    elif even and (not per_pass or times in {2, view.ranks}):
        yield Cause("scheduler-stepped-often", Fit.SEQUENCE, f"{said}: it moves {times} times in each step")


def _moved(rates: list[float]) -> list[int]:
    return [at for at in range(1, len(rates)) if not same(rates[at], rates[at - 1])]
