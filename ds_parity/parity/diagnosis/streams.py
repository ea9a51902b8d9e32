"""Whether both sides cut one stream of rollouts: a few windows of other data fit a rule by chance."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import TypeAlias

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.cut import Cut, common
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import Trace

Sides: TypeAlias = list[list[tuple[int, int]]]
"""What the reference and the candidate had consumed at the end of each step: rollouts, and tokens."""

# Window ends that a rule gives exactly. The first one may have chosen the rule; where a window may end in six places,
# two more are met by chance once in some thirty records.
_EXACT = 3
# Ends at which both sides have consumed as many tokens, where rollouts do not all have as many: each is one of dozens.
_WITH_TOKENS = 2
_SEVERAL_TIMES = 2
# Standard deviations of a rank sum: windows of one target lie as far apart in one of twenty records.
_APART = 1.96


def other_data(view: View, cut: Cut) -> Cause | None:
    """Return the cause that the data are others; None where the record shows one stream, or another size of windows.

    The sizes of windows that end at one target stand in any order as likely as in another, whatever data they are of.
    So a rule has predicted more than chance does where the sizes of one side lie above the other's, where ends are
    exactly those that it gives, or where both sides have consumed as many tokens at them. Tokens that are others there
    show other data, or tokens that are counted otherwise.
    """
    sides = [_consumed(trace) for trace in (view.reference, view.candidate)]
    if _contradicted(view, sides):
        said = "after as many rollouts both sides have consumed other tokens, as of other data"
        return Cause("data-or-seed", Fit.SEQUENCE, said)
    if _one_stream(sides, cut) or _sizes_apart(cut):
        return None
    said = f"windows of other data may end there by chance: the sizes of the windows are alike ({cut.b[:4]} and "
    return Cause("data-or-seed", Fit.SEQUENCE, f"{said}{cut.a[:4]} rollouts)")


def counted_often(view: View, cut: Cut) -> Cause | None:
    """Return the cause that the candidate counts each rollout several times, in what it records, too.

    After as many tokens, of one stream, it has counted a multiple of the reference's rollouts, and its windows end
    with the pass in which that comes to the reference's target. Rollouts that are counted for prompts are no such.
    """
    reference, candidate = (_consumed(trace) for trace in (view.reference, view.candidate))
    of_tokens = {tokens: rollouts for rollouts, tokens in reference if tokens and rollouts}
    both = [(it, of_tokens[tokens]) for it, tokens in candidate if tokens in of_tokens]
    ratios = {mine / its for mine, its in both}
    if view.step(0) > 1 or len(both) < _WITH_TOKENS or len(ratios) != 1 or min(ratios) < _SEVERAL_TIMES:
        return None
    times = ratios.pop()
    of_a_prompt = {one.rollouts / one.prompts for one in view.reference.steps if one.prompts and one.rollouts}
    # Ends of the one side are none of the other's here.
    alone = [
        Cut(held, held, passes, passes, (fewest, fewest))
        for held, passes, fewest in zip((cut.a, cut.b), (cut.of_reference, cut.passes), cut.fewest, strict=True)
    ]
    alike = any(common(*(one.targets(0, carried=carried) for one in alone)) for carried in (True, False))
    if not times.is_integer() or times in of_a_prompt or not alike:
        return None
    said = (
        f"after as many tokens the candidate has counted {times:.0f} times the reference's rollouts ({both[0][0]} for "
    )
    return Cause("sp-double-count", Fit.SEQUENCE, f"{said}{both[0][1]}), and its windows end at the same target")


def _contradicted(view: View, sides: Sides) -> bool:
    """Whether tokens show that both sides did not consume one stream of rollouts in one order, from the start on.

    Where both have consumed as many rollouts, they have as many tokens, and never less of them with more rollouts.
    """
    ends = sorted({end for side in sides for end in side})
    apart = any(y[0] == x[0] or y[1] < x[1] for x, y in pairwise(ends))
    return view.step(0) == 1 and all(sides) and apart


def _consumed(trace: Trace) -> list[tuple[int, int]]:
    """Rollouts and tokens that were consumed at the end of each step; empty where a step does not tell both."""
    held = [(one.rollouts, one.tokens) for one in trace.steps if one.rollouts is not None and one.tokens is not None]
    if len(held) < len(trace.steps):
        return []
    return list(zip(accumulate(it for it, _ in held), accumulate(it for _, it in held), strict=True))


def _one_stream(sides: Sides, cut: Cut) -> bool:
    """Whether window ends show that both sides have the same rollouts, in the same order."""
    of_windows = {tokens / rollouts for side in sides for rollouts, tokens in side if rollouts}
    if len(of_windows) > 1 and len({*sides[0]} & {*sides[1]}) >= _WITH_TOKENS:
        return True
    of_a, of_b = cut.ends
    whole = min((of_a[:-1], of_b[:-1]), key=len)
    nested = len(whole) >= _EXACT and ({*whole} <= {*of_a} and {*whole} <= {*of_b})
    return nested or cut.same >= _EXACT or any(_shifted(of_a, of_b[late:]) for late in (0, 1))


def _shifted(due: list[int], own: list[int]) -> bool:
    """Whether every window ends as many rollouts after one of the reference's; the last one ends with the data."""
    apart = [y - x for x, y in zip(due, own, strict=False)][:-1]
    return len(apart) >= _EXACT and len({*apart}) == 1


def _sizes_apart(cut: Cut) -> bool:
    """Whether the windows of one side are longer than the other's, by their ranks: not two draws of one kind."""
    short = cut.all_used  # the last windows then end with the data
    a, b = (sorted(side[:-1] if short and len(side) > 1 else side) for side in (cut.a, cut.b))
    below = sum((bisect_left(a, it) + bisect_right(a, it)) / 2 for it in b)
    apart = abs(below - len(a) * len(b) / 2) - 0.5
    return apart > _APART * math.sqrt(len(a) * len(b) * (len(a) + len(b) + 1) / 12)
