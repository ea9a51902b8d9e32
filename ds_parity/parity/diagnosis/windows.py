"""Windows that contain other rollouts: where the candidate ends them, beside where the reference does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.view import View, near
from ds_parity.trace import Trace


@dataclass(frozen=True)
class Cut:
    """How both sides cut the same stream of rollouts into windows.

    Attributes:
        a: rollouts of each of the reference's steps.
        b: of each of the candidate's.
        passes: of each of the candidate's steps, 0 where it doesn't say.
        of_reference: passes of each of the reference's steps, likewise.
    """

    a: list[int]
    b: list[int]
    passes: list[int]
    of_reference: list[int]

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """Rollouts consumed at the end of each step of the reference, of the candidate."""
        return list(accumulate(self.a)), list(accumulate(self.b))

    @cached_property
    def same(self) -> int:
        """How many steps contain as many rollouts on both sides, from the first on."""
        pairs = zip(self.a, self.b, strict=False)
        return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(self.a), len(self.b)))

    @property
    def all_used(self) -> bool:
        """Whether both sides train on as many rollouts."""
        return sum(self.a) == sum(self.b)


def causes(view: View) -> Iterator[Cause]:
    """Yield what ends windows exactly where the candidate's end."""
    if view.updated_alike:
        return
    passes = [[one.passes or 0 for one in side.steps] for side in (view.candidate, view.reference)]
    cut = Cut(_rollouts(view.reference), _rollouts(view.candidate), *passes)
    if not (cut.a and cut.b and cut.a[0] and cut.b[0] and _mean(cut.a) and _mean(cut.b)):
        return
    yield from _end(view, cut)
    yield from _start(view, cut)
    yield from _whole(view, cut)
    yield from _length(view, cut)
    yield from _counter(view, cut)


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


def facts(view: View) -> Iterator[str]:
    """Yield where a run ends that has the reference's steps as far as it goes."""
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
    if set(passes) == {1} and len(cut.b) > len(cut.a) and cut.all_used and not _by_prompts(view, cut):
        said = f"{len(cut.b)} steps of one pass each, where the reference takes {len(cut.a)} of the same rollouts"
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
    if passes[0] == passes[1] + 1 and len(set(late)) == 1 and 0 < late[0] < cut.a[0]:
        said = f"every window ends {late[0]} rollouts late: step {view.step(0)} has {passes[0]} passes, the next ones "
        yield Cause("boundary-a-pass-late", Fit.SEQUENCE, f"{said}{passes[1]}")


def _by_prompts(view: View, cut: Cut) -> bool:
    # As many rollouts a step as the reference has prompts, which is the same number in each of its steps.
    prompts = {record.prompts or 0 for record in view.reference.steps[:-1]}
    return len(prompts) == 1 and bool(prompts - {0}) and near(_mean(cut.b), min(prompts), 0.3)


def _whole(view: View, cut: Cut) -> Iterator[Cause]:
    """Windows that are several of the reference's, and parts of one."""
    of_a, of_b = cut.ends
    if not cut.all_used or cut.a == cut.b:
        return
    ranks = view.ranks
    if ranks > 1 and of_b[:-1] == of_a[ranks - 1 :: ranks][: len(of_b) - 1] and len(cut.b) == -(-len(cut.a) // ranks):
        said = f"every window is {ranks} of the reference's ({cut.b[:3]} rollouts), and {ranks} is the number of ranks"
        yield Cause("local-count", Fit.SEQUENCE, said)
    elif set(of_b) < set(of_a):
        missed = len(of_a) - len(of_b)
        said = f"windows end only where the reference's do, and go on past {missed} of its {len(of_a)} boundaries"
        yield Cause("equality-boundary", Fit.SEQUENCE, said)
    elif len(of_b) == len(of_a) + 1 and set(of_a) < set(of_b):
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
    if missing > 0 and cut.same == 0 and shorter:
        less = [record.tokens for record in (view.reference.steps[0], view.candidate.steps[0])]
        fewer_tokens = None not in less and (less[1] or 0) < (less[0] or 0)
        if 0.7 < pace < 1.4 and fewer_tokens:
            said = f"{missing} of {sum(cut.a)} rollouts are in no step, step {view.step(0)} holds {cut.b[0]} of "
            yield Cause("silent-truncation", Fit.CONSTANT, f"{said}{cut.a[0]}")


def _counter(view: View, cut: Cut) -> Iterator[Cause]:
    same, passes = cut.same, cut.passes[:-1]
    known = all(passes) and all(cut.of_reference[:-1])
    if not same or same >= min(len(cut.a), len(cut.b)) or not cut.all_used or not known:
        return
    if len(set(passes)) == 1 and len(passes) > 1 and len(set(cut.b[:-1])) > 1:
        said = f"every window has {passes[0]} passes, whatever they hold ({cut.b[:4]} rollouts)"
        yield Cause("counter-drift", Fit.SEQUENCE, said)
    elif same > 1 and _anew(cut):
        said = (
            f"steps {view.step(0)} to {view.step(0) + same - 1} are alike, then windows are counted anew: step "
            f"{view.step(0) + same} holds {cut.b[same]} rollouts in place of {cut.a[same]}"
        )
        yield Cause("resume-resets-window", Fit.SEQUENCE, said)


def _anew(cut: Cut) -> bool:
    """Whether windows from the first other one on reach a target that is counted from there, without a surplus."""
    of_a, of_b = cut.ends
    # Each of the reference's windows has reached its target, so the target is no more than this.
    target = min(end / number for number, end in enumerate(of_a[:-1], start=1))
    counted = [end - of_b[cut.same - 1] for end in of_b[cut.same : -1]]
    surplus = of_b[cut.same - 1] > target * cut.same
    # Had a window of the reference not ended where its count reached the target, it would have had a pass too many, and
    # its target would not be this: a step that an epoch cuts short, for one. A pass may be twice an average one.
    pass_ = 2 * max(held / passes for held, passes in zip(cut.a, cut.of_reference, strict=True) if passes)
    by_count = all(end - pass_ < int(target) * number for number, end in enumerate(of_a[:-1], start=1))
    return by_count and surplus and all(end >= int(target) * number for number, end in enumerate(counted, start=1))


def _mean(values: list[int]) -> float:
    # The last window is often short.
    whole = values[:-1] or values
    return sum(whole) / len(whole)
