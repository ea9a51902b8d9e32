"""What learning rates leave open where a part of the schedule is recorded: how it came there, or how far it rises.

What a schedule did before may leave a factor in all of its rates. Behind another warm-up a line to 0 is another line to
0; a power of the steps, such as an inverse square root, is so many times itself at another pace; an exponential one is
at another step; and a schedule that rests may do so for any reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

from ds_parity.parity.diagnosis.rates import SAME, same
from ds_parity.parity.diagnosis.view import View, alike

# A line, what `polynomial` schedules of other powers are, and inverse roots.
_POWERS = (1.0, 2.0, 3.0, 4.0, 0.5, -0.5, -1.0, -2.0)
_BEFORE = ("another-warm-up",)
_PLACE = ("schedule-off-by-steps",)
_FASTER = ("scheduler-stepped-often", "schedule-too-short")
_SLOWER = ("schedule-too-long", "scheduler-per-outer-step")


def is_excerpt(view: View) -> bool:
    """Whether the record begins behind the first step."""
    return view.step(0) > 1


def not_seen(view: View) -> str:
    """Return in words which part of the schedule is not recorded."""
    if is_excerpt(view):
        return f"the schedule before step {view.step(0)} is not recorded"
    return "it still rises at the end of the record"


def beside_a_factor(view: View, a: Sequence[float], factor: float) -> tuple[str, ...]:
    """Return what else than another base rate leaves a factor in all rates.

    Args:
        view: two traces side by side.
        a: the reference's rates of a parameter group, of every common step.
        factor: the candidate's in those.

    Returns:
        Names of causes; none where each leaves other rates.
    """
    if not is_excerpt(view):
        # Nor is it seen to which rate a warm-up comes that goes on at the end of the record.
        return _BEFORE if a[-1] > a[-2] and sorted(a) == [*a] else ()
    if any(same(*pair) for pair in pairwise(a)):
        # Where a schedule rests, or goes down by stairs, it is so at many of its places.
        low = ("another-lowest-lr",)
        return ("no-scheduler", *low, *_BEFORE, *_faster(view), *_slower(view), *_PLACE)
    if alike([y / x for x, y in pairwise(a) if x], SAME):
        return (*_BEFORE, *_PLACE)
    some = list(takewhile(lambda rate: rate > 0, a))
    power = next((it for it in _POWERS if _is_line([rate ** (1 / it) for rate in some])), None)
    if power is None:
        return ()
    if not _begins([rate ** (1 / power) for rate in some], view.step(0)):
        return _BEFORE
    # At another pace a power that begins with the run is so many times itself.
    return (*_BEFORE, *(_faster(view) if (factor > 1) == (power > 0) else _slower(view)))


def beside_a_rest(view: View) -> tuple[str, ...]:
    """Return what else than no scheduler leaves one rate in all steps of an excerpt, in which the reference moves.

    A schedule that is over does, one that has not left its first rates, and one that is in the middle of a rest.

    Args:
        view: two traces side by side.

    Returns:
        Names of causes; none in a whole record.
    """
    return ("another-lowest-lr", *_faster(view), *_slower(view), *_PLACE) if is_excerpt(view) else ()


def _faster(view: View) -> tuple[str, ...]:
    return (*(("scheduler-per-pass",) if max(view.passes) != 1 else ()), *_FASTER)


def _slower(view: View) -> tuple[str, ...]:
    return (*_SLOWER, *(("scheduler-budget-in-passes",) if max(view.passes) != 1 else ()))


def _is_line(values: Sequence[float]) -> bool:
    moves = [y - x for x, y in pairwise(values)]
    return len(moves) > 1 and alike(moves, SAME)


def _begins(line: Sequence[float], step: int) -> bool:
    """Whether a line over steps, the first of which is given, is 0 in front of the run's first step, or in the next."""
    before = line[0] / (line[1] - line[0])
    return any(abs(before - (step - 1 + some)) < SAME * max(1, step) for some in (0, 1))
