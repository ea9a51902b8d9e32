"""Two traces without the rests that skipped steps leave in a schedule: its places are the steps in which it moved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis.rates import rests_within, same
from ds_parity.parity.diagnosis.schedule_shapes import digits
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import StepRecord

_FEW = 4  # rates, of which fewer are those of any schedule


@dataclass(frozen=True)
class _Moved(View):
    """Steps that are counted as the schedule counts them, and told by their own numbers.

    Attributes:
        numbers: of the steps in the traces, by their index into `pairs`.
    """

    numbers: tuple[int, ...] = ()

    def step(self, index: int) -> int:
        """The number that a step has in the traces, by its index into `pairs`."""
        return self.numbers[index]


def without_rests(view: View, a: list[float], b: list[float]) -> tuple[View, list[float], list[float]]:
    """Return two traces and their rates with one step for all in which the schedules stood still for a skipped one.

    A scheduler that stays where it is when a step was skipped leaves the same rate in the step behind it. That says
    nothing of the schedule, which has all of its rates in the other steps.

    Args:
        view: two traces side by side.
        a: the reference's rates, of every common step.
        b: the candidate's.

    Returns:
        What was given where no step was skipped, or where a schedule went on behind one.
    """
    skipped = [at for at, pair in enumerate(view.pairs[:-1]) if any(one.skipped for one in pair)]
    stood = (x.skipped == y.skipped for x, y in (view.pairs[at] for at in skipped))
    if not skipped or not all(stood) or not all(same(of[at + 1], of[at]) for of in (a, b) for at in skipped):
        return view, a, b
    # The scheduler moves by what came in the last of them, and its rate is there from the first one on.
    lasting = [at for at in range(len(view.pairs)) if at not in set(skipped)]
    return (view, a, b) if len(lasting) < 2 else _only(view, a, b, lasting)


def without_one_rest(view: View, a: list[float], b: list[float]) -> tuple[View, list[float], list[float]] | None:
    """Return the same for the one rest that both schedules have in one place, though no step is called skipped.

    Args:
        view: two traces side by side.
        a: the reference's rates, of every common step.
        b: the candidate's.

    Returns:
        None where no such rest is, where the reference has others, or where rates of few digits stand still by these.
    """
    rests = rests_within(a) or [at for at, pair in enumerate(pairwise(a)) if same(*pair)]
    if len(rests) != 1 or len(a) < _FEW or not same(b[rests[0] + 1], b[rests[0]]):
        return None
    if digits(view, a, b) or any(one.skipped for pair in view.pairs for one in pair):
        return None
    return _only(view, a, b, [at for at in range(len(a)) if at != rests[0]])


def without_repeats(view: View, a: list[float], b: list[float]) -> tuple[View, list[float], list[float]] | None:
    """Return the same with one step for each rate, where both schedules move once in as many steps.

    So they do where a scheduler is stepped once for several updates with the same rollouts.

    Args:
        view: two traces side by side.
        a: the reference's rates, of every common step.
        b: the candidate's.

    Returns:
        None where one moves in other steps, where most of such steps show no move, where these may be rests that few
        digits leave of a rate that moves in every step, or where some steps were skipped.
    """
    moved = [at for at in range(1, len(a)) if not same(a[at], a[at - 1]) or not same(b[at], b[at - 1])]
    each = math.gcd(*(y - x for x, y in pairwise(moved)))
    if each < 2 or any(one.skipped for pair in view.pairs for one in pair):
        return None
    first = moved[0] % each or each
    lasting = [*range(first - 1, len(a) - 1, each), len(a) - 1]
    most = max(abs(y - x) for of in (a, b) for x, y in pairwise(of))
    if len(lasting) < _FEW or 2 * len(moved) < len(lasting) or most <= 2 * each * digits(view, a, b):
        return None
    return _only(view, a, b, lasting)


def _only(view: View, a: list[float], b: list[float], lasting: list[int]) -> tuple[View, list[float], list[float]]:
    """The steps of some places, by their index into `pairs`, counted as a schedule counts them."""
    begins = [0, *(at + 1 for at in lasting[:-1])]
    sides = [[view.pairs[at][side] for at in lasting] for side in (0, 1)]
    one, other = (
        replace(trace, steps=_counted(steps, view.step(0)))
        for trace, steps in zip((view.reference, view.candidate), sides, strict=True)
    )
    found = compare(one, other, view.comparison.tier, view.comparison.dtype)
    numbers = tuple(view.step(at) for at in begins)
    return _Moved(one, other, found, view.begins, numbers), [a[at] for at in lasting], [b[at] for at in lasting]


def _counted(steps: list[StepRecord], begin: int) -> tuple[StepRecord, ...]:
    return tuple(step.model_copy(update={"step": at}) for at, step in enumerate(steps, begin))
