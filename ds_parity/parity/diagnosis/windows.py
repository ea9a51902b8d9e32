"""Windows that contain other rollouts: where the candidate ends them, beside where the reference does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from ds_parity.parity.diagnosis import ragged, streams, targets
from ds_parity.parity.diagnosis.causes import Cause, as_one_group
from ds_parity.parity.diagnosis.cut import Cut, before_last_passes
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.nearness import near
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import Trace

_SEVERAL = 2  # windows that hold different numbers: others of their place hold the same by chance once in thousands
_ABOUT_A_PASS = 0.4  # of a pass: the mean of a few windows


def causes(view: View) -> Iterator[Cause]:
    """Yield what ends windows exactly where the candidate's end."""
    # Windows that one side doesn't have are not the other's windows, cut elsewhere.
    if view.updated_alike or begins_elsewhere(view) or _reordered(view) or _one_apart(view):
        return
    passes, of_reference = ([one.passes or 0 for one in it.steps] for it in (view.candidate, view.reference))
    fewest = before_last_passes(view.reference), before_last_passes(view.candidate)
    cut = Cut(_rollouts(view.reference), _rollouts(view.candidate), passes, of_reference, fewest)
    if not (cut.a and cut.b and cut.a[0] and cut.b[0] and _mean(cut.a) and _mean(cut.b)):
        return
    often = streams.counted_often(view, cut)
    if often:  # all rules below take a rollout of one side for one of the other
        yield often
        return
    found = [*_end(view, cut), *_start(view, cut), *_whole(cut), *_length(view, cut), *_counter(cut)]
    if cut.apart:
        found += targets.causes(view, cut)
        told = {cause.name for cause in found}
        found += [cause for cause in ragged.causes(view, cut) if cause.name not in told]
    yield from _with_targets(view, cut, found)


def _reordered(view: View) -> bool:
    """Whether both sides have the same windows in another order, so that none of them ends elsewhere."""
    held = _held(view)
    return held is not None and held[0] != held[1] and Counter(held[0]) == Counter(held[1])


def _one_apart(view: View) -> bool:
    """Whether one window alone holds something else, and those behind it the reference's.

    Had it ended elsewhere, those behind it would begin elsewhere, and hold other tokens.
    """
    held = _held(view)
    if held is None or len(held[0]) != len(held[1]):
        return False
    apart = [at for at, (mine, its) in enumerate(zip(*held, strict=True)) if mine != its]
    return len(apart) == 1 and len({*held[0][apart[0] + 1 :]}) >= _SEVERAL


def _held(view: View) -> list[list[tuple[int, int]]] | None:
    """Rollouts and tokens of all windows, of both sides; None where a step does not tell both."""
    held = [
        [(one.rollouts, one.tokens) for one in side.steps if one.rollouts is not None and one.tokens is not None]
        for side in (view.reference, view.candidate)
    ]
    told = [len(one) for one in held] == [len(view.reference.steps), len(view.candidate.steps)]
    return held if told else None


def _with_targets(view: View, cut: Cut, found: list[Cause]) -> Iterator[Cause]:
    """The causes, with what else ends windows there: those that predict all windows as one group."""
    if cut.apart and (targets.shows_targets(cut) or any(cause.fit is Fit.SEQUENCE for cause in found)):
        another = targets.another(cut)
        # On several ranks another target, a setting, is the simpler reading of half as many rollouts.
        often = targets.often(cut) if another is None or view.ranks == 1 else None
        if another and view.is_excerpt:
            found += _at_other_passes(cut)
        if another and _prompts_are_targets(view, cut):
            found = [replace(it, fit=Fit.SEQUENCE) if it.name == "sequences-as-prompts" else it for it in found]
        found += [it for it in (another, often) if it]
    if cut.apart and any(it.fit is Fit.SEQUENCE for it in found):
        found += [_of_passes(cut)] if _as_many_passes(cut) else []
        found += _beside(view, cut, {it.name for it in found})
    if cut.apart and view.is_excerpt and any(it.fit is Fit.SEQUENCE for it in found):
        # What came before an excerpt is as open as what is in it.
        said = f"the windows before step {view.step(0)} are not recorded"
        names = {"another-target", "data-or-seed"} - {it.name for it in found}
        found += [Cause(name, Fit.SEQUENCE, said) for name in sorted(names)]
    # Each of these ends all windows where they end.
    alike = iter(as_one_group([it for it in found if it.fit is Fit.SEQUENCE]))
    yield from (next(alike) if it.fit is Fit.SEQUENCE else it for it in found)


def _beside(view: View, cut: Cut, told: set[str]) -> list[Cause]:
    """What is named only beside another rule, where that was not told before."""
    own = None if "local-count" in told else ragged.own_counts(view, cut)
    later = None if "another-overshoot" in told else targets.overshoot_from(view, cut)
    return [it for it in (own, later, streams.other_data(view, cut), _dropped(view, cut)) if it]


def _at_other_passes(cut: Cut) -> Iterator[Cause]:
    """What ends every window of an excerpt a pass late or early: its first window shows it, which is not recorded."""
    further, said = _mean(cut.b) - _mean(cut.a), f"windows hold {cut.b[:3]} rollouts for {cut.a[:3]}"
    if all(cut.passes) and all(cut.of_reference):
        further = _mean(cut.passes) - _mean(cut.of_reference)
        if not near(abs(further), 1.0, _ABOUT_A_PASS):
            return
        said = f"windows have {cut.passes[:3]} passes for {cut.of_reference[:3]}"
    name = "boundary-a-pass-late" if further > 0 else "boundary-off-by-one"
    yield Cause(name, Fit.SEQUENCE, f"{said}, and the run's first is not recorded")


def _prompts_are_targets(view: View, cut: Cut) -> bool:
    """Whether the reference's prompts of a step are a target with which the candidate's windows end where they do."""
    prompts = view.reference.steps[0].prompts or 0
    return any(prompts in cut.targets(1, carried=carried) for carried in (True, False))


def _rollouts(trace: Trace) -> list[int]:
    """Return the rollouts of every step; none where a trainer doesn't record them."""
    known = [record.rollouts for record in trace.steps if record.rollouts is not None]
    return known if len(known) == len(trace.steps) else []


def ends_early(view: View) -> bool:
    """Whether the candidate has the reference's first steps, all of them equal, and no others."""
    numbers = [[one.step for one in side.steps] for side in (view.reference, view.candidate)]
    return (
        view.fields == {"step"}
        and 0 < len(numbers[1]) < len(numbers[0])
        and numbers[1] == numbers[0][: len(numbers[1])]
    )


def begins_elsewhere(view: View) -> bool:
    """Whether the traces begin with different steps, as the one of a resumed run does beside that of the whole."""
    return len({*view.begins}) > 1


def facts(view: View) -> Iterator[str]:
    """Yield where a run begins, if elsewhere, and where one ends that has the reference's steps as far as it goes."""
    if begins_elsewhere(view) and "step" in view.fields:
        said = "the candidate begins with step {1}, and the reference with step {0}".format(*view.begins)
        yield f"{said}; the steps that both have agree" if view.fields == {"step"} else said
    if ends_early(view):
        due = view.reference.steps[len(view.candidate.steps)]
        held = "" if due.rollouts is None else f" of {due.rollouts} rollouts"
        yield f"the candidate ends with step {view.candidate.steps[-1].step}, where step {due.step}{held} was due"


def _end(view: View, cut: Cut) -> Iterator[Cause]:
    if cut.b != cut.a[:-1] or not ends_early(view):
        return
    if _is_short(cut.a, _last_passes(view, cut), from_start=view.step(0) == 1):
        others = min(cut.a[:-1])
        said = f"all steps but the last are there, and equal; it holds {cut.a[-1]} rollouts, and the others "
        said += f"{others} or more: too few for a whole window"
        yield Cause("partial-window-leak", Fit.SEQUENCE, said)
        yield Cause("indivisible-batch", Fit.SEQUENCE, said)


def _last_passes(view: View, cut: Cut) -> list[float]:
    """How many rollouts the last pass of each common window may have held: a micro-batch of each rank.

    Half of the window where its passes are not known.
    """
    micro_batches = [n * view.ranks - idle for n, idle in zip(view.passes, view.idle, strict=True)]
    return [
        count * min(1.0, view.ranks / n if n > 0 else 0.5)
        for count, n in zip(cut.a[: len(micro_batches)], micro_batches, strict=True)
    ]


def _is_short(held: list[int], last_passes: list[float], *, from_start: bool) -> bool:
    """Whether the last window ended before its target, for each target that the windows before may have had.

    Args:
        held: rollouts of all windows.
        last_passes: rollouts that the last pass of each window but the last may have held.
        from_start: the first window is that of the run, so that no surplus was carried into it.
    """
    *whole, last = held
    if len(whole) > 1 and len(set(whole)) == 1:
        return last < whole[0]
    # Before its last pass no window had reached its target.
    *ends, end = accumulate(held)
    # Windows that each count from 0, and windows that begin with what the one before had beyond its target.
    counted = [(whole, [1] * len(whole), last, 1)]
    for surplus in range(1 if from_start else math.ceil(max(last_passes))):
        reached = [one + surplus for one in ends]
        counted.append((reached, list(range(1, len(held))), end + surplus, len(held)))
    short = []
    for reached, numbers, at_last, number in counted:
        missed = [(one - most) / n for one, most, n in zip(reached, last_passes, numbers, strict=True)]
        target = math.floor(max(0.0, *missed)) + 1
        if all(target * n <= one for one, n in zip(reached, numbers, strict=True)):
            short.append(at_last < target * number)
    return bool(short) and all(short)


def _start(view: View, cut: Cut) -> Iterator[Cause]:
    of_a, of_b = cut.ends
    passes = cut.passes
    # Where passes are not known, each of several windows in the place of one may be one.
    of_one = {0, *of_a} <= {0, *of_b} and len(cut.b) >= 2 * len(cut.a) - 1 and set(passes) == {0}
    if (set(passes) == {1} or of_one) and len(cut.b) > len(cut.a) and cut.all_used:
        told = "that may be of one pass each" if of_one else "of one pass each"
        said = f"{len(cut.b)} steps {told}, where the reference takes {len(cut.a)} of the same rollouts"
        yield Cause("step-per-pass", Fit.SEQUENCE, said)
        return
    if len(set(passes[1:-1])) != 1 or len(passes) < 3:
        return
    beyond = [y - x for x, y in zip(of_a, of_b[1:], strict=False)]
    if passes[0] == 1 and passes[1] > 1 and len(set(beyond[:-1])) == 1 and 0 < beyond[0] <= cut.b[0]:
        said = (
            f"step {view.step(0)} is one pass of {cut.b[0]} rollouts, and every window after it ends {beyond[0]} "
            f"rollouts after one of the reference's ({cut.a[1:3]})"
        )
        yield Cause("boundary-off-by-one", Fit.SEQUENCE, said)
    late = [y - x for x, y in zip(of_a, of_b, strict=False)][:-1]
    if len(set(late)) != 1:
        return
    # Of later steps the first in the record is no first window, which may be short for many reasons.
    if 0 < passes[0] == passes[1] - 1 and 0 < -late[0] < cut.a[0] and view.step(0) == 1 and not targets.lost(view, cut):
        said = (
            f"step {view.step(0)} has {passes[0]} passes, the next ones {passes[1]}, and every window ends {-late[0]} "
            "rollouts before the reference's"
        )
        yield from (Cause(name, Fit.SEQUENCE, said) for name in ("boundary-off-by-one", "step-in-mid-window"))
    if passes[0] == passes[1] + 1 and 0 < late[0] < cut.a[0]:
        said = f"every window ends {late[0]} rollouts late: step {view.step(0)} has {passes[0]} passes, the next ones "
        yield Cause("boundary-a-pass-late", Fit.SEQUENCE, f"{said}{passes[1]}")


def _by_prompts(view: View, cut: Cut) -> bool:
    # As many rollouts a step as the reference has prompts, which is the same number in each of its steps.
    prompts = {record.prompts or 0 for record in view.reference.steps[:-1]}
    return len(prompts) == 1 and bool(prompts - {0}) and near(_mean(cut.b), min(prompts), 0.3)


def _whole(cut: Cut) -> Iterator[Cause]:
    """All of the reference's windows, and one more."""
    of_a, of_b = cut.ends
    if cut.all_used and len(of_b) == len(of_a) + 1 and set(of_a) < set(of_b):
        step = next(at for at, end in enumerate(of_b) if end not in of_a)
        said = f"all windows of the reference are there, and one of them makes two steps, {step + 1} and {step + 2}"
        yield Cause("step-in-mid-window", Fit.SEQUENCE, said)


def _length(view: View, cut: Cut) -> Iterator[Cause]:
    pace = _mean(cut.a) / _mean(cut.b)
    if _by_prompts(view, cut) and pace > 1.5:
        prompts = view.reference.steps[0].prompts
        said = f"{_mean(cut.b):.1f} rollouts a step, near the reference's {prompts} prompts, "
        yield Cause("sequences-as-prompts", Fit.CONSTANT, f"{said}which have {_mean(cut.a):.1f} rollouts")
    elif view.ranks == 1 and round(pace) > 1 and near(pace, round(pace), 0.15) and cut.all_used:
        said = f"windows are {pace:.2g} times too short: micro-batches are counted so often"
        yield Cause("sp-double-count", Fit.CONSTANT, said)
    missing = sum(cut.a) - sum(cut.b)
    # Where the first window alone is shorter, the others may be no more than shifted.
    shorter = all(y < x for x, y in zip(cut.a[:1], cut.b[:1], strict=False)) and cut.a[1:-1] != cut.b[1:-1]
    # Before an excerpt both sides may have consumed any number of rollouts.
    if missing > 0 and cut.same == 0 and shorter and view.step(0) == 1:
        tokens = [[record.tokens or 0 for record in side.steps] for side in (view.reference, view.candidate)]
        fewer_tokens = 0 < tokens[1][0] < tokens[0][0] and sum(tokens[1]) < sum(tokens[0])
        # A window of fewer passes ended earlier, and what it lacks is in the next one.
        earlier = 0 < cut.passes[0] < cut.of_reference[0]
        if 0.7 < pace < 1.4 and fewer_tokens and not earlier:
            said = f"{missing} of {sum(cut.a)} rollouts are in no step, step {view.step(0)} holds {cut.b[0]} of "
            # Other data may have fewer rollouts, too.
            for name in ("silent-truncation", "data-or-seed"):
                yield Cause(name, Fit.CONSTANT, f"{said}{cut.a[0]}")


def _dropped(view: View, cut: Cut) -> Cause | None:
    """Return the cause that rollouts are dropped, where windows have the reference's micro-batches, with less in them.

    One stream that is cut at another target has as many rollouts after as many passes.
    """
    if not cut.counted or len(cut.a) != len(cut.b) or len(view.pairs) != len(cut.a):
        return None
    counts = [((a.rollouts or 0) - (b.rollouts or 0), (a.tokens or 0) - (b.tokens or 0)) for a, b in view.pairs]
    same = all(a.passes == b.passes and a.idle_passes == b.idle_passes for a, b in view.pairs)
    if not same or any(rollouts < 0 or (rollouts > 0) != (tokens > 0) for rollouts, tokens in counts):
        return None
    said = f"every window has as many passes as the reference's, and they lack {sum(it for it, _ in counts)} of its "
    return Cause("silent-truncation", Fit.SEQUENCE, f"{said}{sum(cut.a)} rollouts")


def _counter(cut: Cut) -> Iterator[Cause]:
    same = cut.same
    if same and same < min(len(cut.a), len(cut.b)) and cut.all_used and _as_many_passes(cut):
        yield _of_passes(cut)


def _as_many_passes(cut: Cut) -> bool:
    """Whether all whole windows have as many passes, whatever these hold; windows of one pass each show no counter."""
    passes = cut.passes[:-1]
    return cut.counted and len(set(passes)) == 1 < len(passes) and passes[0] > 1 and len(set(cut.b[:-1])) > 1


def _of_passes(cut: Cut) -> Cause:
    said = f"every window has {cut.passes[0]} passes, whatever they hold ({cut.b[:4]} rollouts)"
    return Cause("counter-drift", Fit.SEQUENCE, said)


def _mean(values: list[int]) -> float:
    # The last window is often short.
    whole = values[:-1] or values
    return sum(whole) / len(whole)
