"""Windows of passes that are not alike: which rules end them there, though no two of them show it in the same way."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.cut import Cut, common
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.targets import lost
from ds_parity.parity.diagnosis.view import View


def causes(view: View, cut: Cut) -> Iterator[Cause]:
    """Yield the rules by which the candidate's windows end where they do, whatever each pass holds."""
    if cut.counted and all(cut.passes) and all(cut.of_reference):
        yield from _per_pass(view, cut)
        yield from _late(view, cut)
        yield from _early(view, cut)


def own_counts(view: View, cut: Cut) -> Cause | None:
    """Return the cause that a window ends where one rank alone reaches the target, if all windows may have ended so.

    A trace does not tell what each rank had. The rank that reaches the target has as much as that, and each other one
    a rollout in every pass in which it is not idle; before the last pass none of them had reached the target. So much
    is true of many windows, and names nothing by itself.
    """
    ranks = view.ranks
    if ranks < 2 or view.candidate.header.ranks is None or not cut.counted:
        return None
    # One rank reaches it no sooner than all do together, and in the same pass only if it has nearly all rollouts.
    if cut.same or any(own < due for due, own in zip(*cut.ends, strict=False)):
        return None
    begins = [0, *cut.ends[1]]
    least = 1 + max((-(-(had - begin) // ranks) for had, begin in zip(cut.before[1], begins, strict=False)), default=0)
    most = [
        held - max(0, (ranks - 1) * (one.passes or 0) - (ranks * (one.passes or 0) if idle is None else idle))
        for held, one in zip(cut.b[:-1], view.candidate.steps, strict=False)
        for idle in (one.idle_passes,)
    ]
    for carried in (True, False):
        due = cut.targets(0, carried=carried)
        # No rank may have come to any target before the data ended, where they end the only window.
        target = common(due, range(least, min(most, default=due.stop - 1) + 1))
        if target:
            said = f"every window may end with the pass in which one of {ranks} ranks reaches {target[0]} rollouts"
            alone = f"the only window may end before one of {ranks} ranks has reached {target[-1]} rollouts"
            return Cause("local-count", Fit.SEQUENCE, f"{said if most else alone} by its own count")
    return None


def _per_pass(view: View, cut: Cut) -> Iterator[Cause]:
    """Steps of one pass each, which end no later than the reference's do; both runs end where they like."""
    if set(cut.passes) != {1} or set(cut.of_reference) == {1} or len(cut.b) < 2 or cut.all_used:
        return
    # From the first step of the run on both sides have the same passes. Later ones begin with others.
    if view.step(0) == 1 and _knots(cut) is None:
        return
    said = f"each of {len(cut.b)} steps is one pass, where the reference's have {min(cut.of_reference)} or more"
    yield Cause("step-per-pass", Fit.SEQUENCE, said)


def _one_of(cut: Cut, targets_of: Callable[..., range]) -> int | None:
    """Return the lowest target of the reference that a rule leaves, with a surplus that is carried, or is not.

    Args:
        cut: the windows of both sides.
        targets_of: called with `carried`; the targets with which the candidate's windows may end by the rule.
    """
    left = (common(cut.targets(0, carried=carried), targets_of(carried=carried)) for carried in (True, False))
    return next((targets[0] for targets in left if targets), None)


def _a_pass_apart(view: View, cut: Cut, name: str, where: str) -> Cause:
    said = (
        f"every window may end one pass {where}: step {view.step(0)} has {cut.passes[0]} passes, the reference's has "
    )
    return Cause(name, Fit.SEQUENCE, said + str(cut.of_reference[0]))


def _late(view: View, cut: Cut) -> Iterator[Cause]:
    """Windows that each end a pass after the one that reaches the reference's target."""
    knots = _knots(cut)
    if view.step(0) != 1 or knots is None or cut.passes[0] != cut.of_reference[0] + 1:
        return
    # Only a window that ends with the data, as the last one may, ends in its first pass.
    if 1 in cut.passes[:-1]:
        return
    target = _one_of(cut, partial(_targets_of_late, cut, knots))
    if target is not None:
        yield _a_pass_apart(view, cut, "boundary-a-pass-late", f"after the one that reaches {target} rollouts")


def _targets_of_late(cut: Cut, knots: list[tuple[int, int]], *, carried: bool) -> range:
    """The targets that the last pass but one of each of the candidate's windows may have reached, and none before."""
    least, most = 1, cut.ends[1][-1]
    ends = list(zip(accumulate(cut.passes), cut.ends[1], strict=True))
    known = dict(knots)
    for at, (last, end) in enumerate(ends):
        base, number = (0, at + 1) if carried else (ends[at - 1][1] if at else 0, 1)
        first = ends[at - 1][0] if at else 0
        if last - first < 2:
            continue
        # Every pass has a rollout.
        until, had = knots[bisect_right(knots, (last - 2, math.inf)) - 1]
        had += last - 2 - until
        least = max(least, (max(had, end - 2 * cut.longest) - base) // number + 1)
        if at < len(ends) - 1:
            most = min(most, (known.get(last - 1, end - 1) - base) // number)
    return range(least, most + 1)


def _early(view: View, cut: Cut) -> Iterator[Cause]:
    """Windows that each end a pass before the one that reaches the reference's target, but where it is their first."""
    knots = _knots(cut)
    if view.step(0) != 1 or knots is None or cut.passes[0] != max(1, cut.of_reference[0] - 1) or lost(view, cut):
        return
    target = _one_of(cut, partial(_targets_of_early, cut, knots))
    if target is not None:
        yield _a_pass_apart(view, cut, "boundary-off-by-one", f"before its count comes to {target} rollouts")


def _targets_of_early(cut: Cut, knots: list[tuple[int, int]], *, carried: bool) -> range:
    """The targets that the pass behind each of the candidate's windows may reach, and none of its own after its first.

    The last window ends with the data, or with the run.
    """
    least, most = 1, 2 * cut.ends[1][-1]
    for at, (last, end) in enumerate(zip(accumulate(cut.passes), cut.ends[1], strict=True)):
        base, number = (0, at + 1) if carried else (cut.ends[1][at - 1] if at else 0, 1)
        if cut.passes[at] > 1:
            least = max(least, (end - base) // number + 1)
        if at < len(cut.passes) - 1:
            most = min(most, (_at_most(knots, last + 1, end + cut.longest) - base) // number)
    return range(least, most + 1)


def _at_most(knots: list[tuple[int, int]], passes: int, limit: int) -> int:
    """How many rollouts so many passes have at most, if each of those up to the next one that is known has one."""
    until, had = knots[min(bisect_left(knots, (passes, 0)), len(knots) - 1)]
    return min(limit, had - (until - passes)) if until >= passes else limit


def _knots(cut: Cut) -> list[tuple[int, int]] | None:
    """Passes, and rollouts up to them, where either side ends a window; None where they are not of the same passes."""
    sides = (cut.of_reference, cut.ends[0]), (cut.passes, cut.ends[1])
    knots = sorted({(0, 0), *(it for passes, ends in sides for it in zip(accumulate(passes), ends, strict=True))})
    alike = all(x[0] < y[0] and y[1] - x[1] >= y[0] - x[0] for x, y in pairwise(knots))
    return knots if alike else None
