"""Windows that end by another target, or by another count of what was consumed, and where they would."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.cut import Cut, common
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.view import View

# Window ends are multiples of a number by chance: all of them in one of so many records, at the most.
_CHANCE = 20
# Ranks that may share a sequence: those of one machine.
_SHARED_BY = range(2, 9)


def causes(view: View, cut: Cut) -> Iterator[Cause]:
    """Yield the counts that end windows exactly where the candidate's end."""
    yield from _local(view, cut)
    yield from _exact(cut) or _multiples(cut)
    yield from _overshoot(cut)
    yield from _resumed(view, cut)
    yield from _interrupted(view, cut)


def _local(view: View, cut: Cut) -> Iterator[Cause]:
    """Windows that are as many of the reference's as there are ranks."""
    of_a, of_b = cut.ends
    told = view.candidate.header.ranks is not None
    for ranks in (view.ranks,) if told else range(2, len(of_a)):
        due = of_a[ranks - 1 :: ranks]
        pairs = list(zip(due, of_b[:-1], strict=False))
        whole = len(cut.b) == -(-len(cut.a) // ranks) if cut.all_used else len(pairs) > 1
        if ranks > 1 and whole and pairs and all(x == y for x, y in pairs):
            said = f"every window is {ranks} of the reference's ({cut.b[:3]} rollouts), and {ranks} "
            said += "is the number of ranks" if told else "may be the number of ranks, which the traces don't hold"
            yield Cause("local-count", Fit.SEQUENCE, said)
            return


def _exact(cut: Cut) -> list[Cause]:
    """A test for the target itself, which a pass jumps over that has more than what is missing."""
    of_a, of_b = cut.ends
    for carried in (True, False):
        for target in _met(cut, cut.targets(0, carried=carried)):
            hit = [end == number * target for number, end in enumerate(of_a[:-1], start=1)]
            first = hit.index(False) if False in hit else len(hit)
            # What has jumped over a target may meet a multiple of it, or go on to the end.
            again = [end for end, met in zip(of_a, hit, strict=False) if met]
            if of_b != of_a and of_b in ([*again, of_a[-1]] if carried else [], [*of_a[:first], of_a[-1]]):
                said = f"windows end only where rollouts come to a multiple of {target} exactly, and go on past "
                said += f"{hit.count(False)} of the reference's {len(of_a)} boundaries, which are beyond it"
                return [Cause("equality-boundary", Fit.SEQUENCE, said)]
    return []


def _multiples(cut: Cut) -> list[Cause]:
    """The same test of all that was consumed, wherever the windows of the reference are counted from, and runs end."""
    of_a, of_b = cut.ends
    *whole, until = of_b
    past = {end for end in of_a if end <= until}.difference(of_b)
    due = [cut.targets(0, carried=carried) for carried in (True, False)] if cut.counted and past else []
    step = math.gcd(*whole)
    pairs = [(it, step // it) for it in range(1, math.isqrt(step) + 1) if step % it == 0] if any(due) else []
    for target in sorted(it for pair in pairs for it in pair if any(it in some for some in due)):
        if target ** len(whole) >= _CHANCE and not any(end % target == 0 for end in past):
            said = f"windows end only where all rollouts come to a multiple of {target} exactly ({of_b[:3]}), and go "
            said += f"on past {len(past)} of the reference's {len(of_a)} boundaries, which are none"
            return [Cause("equality-boundary", Fit.SEQUENCE, said)]
    return []


def _met(cut: Cut, targets: range) -> Sequence[int]:
    """The targets of which the candidate's first window may be the first that ends at a multiple, or that meet none."""
    of_a, of_b = cut.ends
    if len(of_b) == 1:
        return targets[:2]  # one of them is not where the reference's first window ends
    numbers = [number for number, end in enumerate(of_a[:-1], start=1) if end == of_b[0]]
    return sorted(of_b[0] // it for it in numbers if of_b[0] % it == 0 and of_b[0] // it in targets)


def _overshoot(cut: Cut) -> Iterator[Cause]:
    """The same target, and a surplus that one side carries into the next window and the other drops."""
    if not cut.counted:
        return
    for carries in (0, 1):
        target = common(cut.targets(carries, carried=True), cut.targets(1 - carries, carried=False))
        if target:
            words = "drops" if carries == 0 else "carries on"
            said = (
                f"every window ends with the pass that reaches {_told(target)} rollouts, where the candidate {words} "
            )
            other = "carries on" if carries == 0 else "drops"
            said += f"what a window has beyond them, which the reference {other} ({cut.b[:4]}, not {cut.a[:4]})"
            yield Cause("another-overshoot", Fit.SEQUENCE, said)


def overshoot_from(view: View, cut: Cut) -> Cause | None:
    """Return the cause that a surplus is treated otherwise from a later step on, where all windows may have ended so.

    Windows of both kinds may be alike behind that step, too. So few ends as follow fit by chance: it names nothing by
    itself.
    """
    same = cut.same
    if not cut.counted or not 0 < same < len(cut.b) - 1:
        return None
    due = {carries: cut.targets(0, carried=not carries) for carries in (True, False)}
    # Where each window counts from 0, those that are alike on both sides exclude no target of the reference.
    places = [(False, same), *((True, after) for after in range(1, same + 1))]
    for carries, after in places:
        target = cut.targets(1, carried=carries, after=after, among=due[carries]) if due[carries] else range(0)
        if target:
            words = "carries on" if carries else "drops"
            said = f"from step {view.step(0) + after} on every window may end with the pass that reaches "
            said += f"{_told(target)} rollouts, where the candidate {words} what a window has beyond them"
            return Cause("another-overshoot", Fit.SEQUENCE, said)
    return None


def _resumed(view: View, cut: Cut) -> Iterator[Cause]:
    """The windows of the reference up to a resume, and from there on those that are counted without a surplus."""
    same = cut.same
    if not 0 < same < len(cut.b) - 1 or not cut.all_used or not cut.counted:
        return
    due = cut.targets(0, carried=True)
    for after in range(1, same + 1):
        # Without a surplus there is none to forget.
        surplus = range(due.start, min(due.stop, -(-cut.ends[1][after - 1] // after)))
        if surplus and cut.targets(1, carried=True, after=after, among=surplus):
            said = f"windows are alike up to step {view.step(0) + same - 1}, and then counted anew: step "
            said += f"{view.step(0) + same} holds {cut.b[same]} rollouts in place of {cut.a[same]}"
            yield Cause("resume-resets-window", Fit.SEQUENCE, said)
            return


def _interrupted(view: View, cut: Cut) -> Iterator[Cause]:
    """One window that ends before the reference's target, and behind it those that are counted anew to that target."""
    at = cut.same
    if not cut.counted or at >= len(cut.b) - 1 or cut.passes[at] >= cut.of_reference[at] or lost(view, cut):
        return
    for carried in (True, False):
        due = cut.targets(0, carried=carried)
        had, number = (cut.ends[1][at], at + 1) if carried else (cut.b[at], 1)
        missed = range(max(due.start, had // number + 1), due.stop)
        target = cut.targets(1, carried=carried, after=at + 1, among=missed) if missed else missed
        if target:
            said = f"step {view.step(at)} ends with {cut.b[at]} rollouts, in mid-window, and every other one with the "
            said += f"pass that reaches {_told(target)}, as the reference's do"
            # A count that is off by one at first has such a first window, too.
            first = at == 0 and view.step(0) == 1 and cut.passes[0] in (1, cut.of_reference[0] - 1)
            for name in ("step-in-mid-window", *(("boundary-off-by-one",) if first else ())):
                yield Cause(name, Fit.SEQUENCE, said)
            return


def lost(view: View, cut: Cut) -> bool:
    """Whether the first window that is another may lack rollouts that no other one has: those hold what they should."""
    later = view.pairs[cut.same + 1 : -1]
    same = all(a.rollouts == b.rollouts and (a.tokens is None or a.tokens == b.tokens) for a, b in later)
    return same and not cut.all_used


def another(cut: Cut) -> Cause | None:
    """Return the cause that a target is another, where there are targets with which each side ends its windows."""
    for carried in (True, False):
        due, own = (cut.targets(side, carried=carried) for side in (0, 1))
        if due and own:
            said = f"every window ends with the pass that reaches {_told(own)} rollouts, where the reference's end at "
            return Cause("another-target", Fit.SEQUENCE, f"{said}{_told(due)}")
    return None


def often(cut: Cut) -> Cause | None:
    """Return the cause that a rollout counts several times, where the candidate's windows end with such a count.

    The reference's target need not be a multiple of that number: half of an odd one is no target of single rollouts.
    """
    due = [(carried, it) for carried in (True, False) if (it := cut.targets(0, carried=carried))]
    for times, (carried, wanted) in product(_SHARED_BY, due):
        target = _as_counted(cut, times).targets(1, carried=carried, among=wanted)
        if target:
            said = f"every window ends with the pass that reaches {_told(target)} rollouts, as the reference's do, "
            said += f"where each of the candidate's is counted {times} times"
            return Cause("sp-double-count", Fit.SEQUENCE, said)
    return None


def _as_counted(cut: Cut, times: int) -> Cut:
    """The same windows, in which every rollout counts so often."""
    a, b, of_a, of_b = ([it * times for it in some] for some in (cut.a, cut.b, *cut.fewest))
    return replace(cut, a=a, b=b, fewest=(of_a, of_b))


def shows_targets(cut: Cut) -> bool:
    """Whether windows show a target by themselves: several, with passes, or as many rollouts, or whole ones of a side.

    Windows that are shorter than the reference's hold fewer rollouts also where some were dropped.
    """
    of_a, of_b = (set(ends) for ends in cut.ends)
    uniform = len({*cut.a[:-1]}) == 1 and len({*cut.b[:-1]}) == 1
    if min(len(cut.a), len(cut.b)) < 3 or not (cut.counted or uniform or of_a < of_b or of_b < of_a):
        return False
    return cut.all_used or not 0.7 < sum(cut.b[: len(cut.a)]) / sum(cut.a[: len(cut.b)]) <= 1


def _told(target: range) -> str:
    return str(target[0]) if len(target) == 1 else f"{target[0]} to {target[-1]}"
