"""Learning rates that are the reference's, at other places of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise, repeat, tee

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.nearness import alike, near
from ds_parity.parity.diagnosis.rates import MOST, SAME, equal, follows, same, tells, where_due
from ds_parity.parity.diagnosis.schedule_excerpts import not_seen, of_many_moves
from ds_parity.parity.diagnosis.schedule_stairs import stairs_of
from ds_parity.parity.diagnosis.view import View

_FARTHEST = 4096  # places before an excerpt
_BEGUN = 8


@dataclass(frozen=True)
class Course:
    """The reference's schedule beyond its last step: it goes on as it went last, between a lowest and a highest rate.

    Attributes:
        known: the rates of its steps.
        lowest: no rate beyond them is lower.
        highest: nor higher.
    """

    known: list[float]
    lowest: float
    highest: float

    def at(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        if step < len(self.known):
            return self.known[step]
        move = self.known[-1] - self.known[-2]
        beyond = self.known[-1] + (step - len(self.known) + 1) * move
        # Where it comes to rest at 0, what rounding leaves over is no rate.
        if abs(beyond - self.lowest) < SAME * abs(move):
            return self.lowest
        return max(self.lowest, min(beyond, self.highest))

    @property
    def is_line(self) -> bool:
        """Whether it moves by as much in every step up to the one, if there is one, in which it comes to rest."""
        moves = [y - x for x, y in pairwise(self.known)]
        while moves and not moves[-1]:
            moves.pop()
        if len(moves) < 2 or not moves[0]:
            return False
        *whole, last = (it / moves[0] for it in moves)
        return alike(whole, 1e-6) and 0 < last < 1 + 1e-6


def course(a: list[float], b: list[float]) -> Course | None:
    """The reference's schedule as a line, if its last two moves are alike; up to the rate at which the candidate stays.

    A schedule that has come to rest stays there: warm-up is over. That of a line is so from its first rest on.
    """
    moves = [y - x for x, y in pairwise(a)]
    if len(moves) > 2 and not moves[-1] and moves[0] > 0 and alike(moves[:-1], 1e-6):
        return Course(a, float("-inf"), float("inf"))
    if len(moves) < 2 or len(set(a)) == 1 or not near(moves[-1], moves[-2], 1e-6):
        return None
    stays = b[-1] == b[-2] and moves[-1] != 0
    # None is below 0, where both sides have no such rates.
    end = 0.0 if min(*a, *b) >= 0 else float("-inf")
    return Course(a, min(b) if stays else end, max(b) if stays else float("inf"))


def ahead(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """From the first step that differs on, the rates of later steps of the reference."""
    first, step = view.first, view.step(view.first)
    after, longer, stairs = b[first:], course(a, b), stairs_of(view, a)
    for by in range(1, MOST if longer else len(a) - first):
        # Rates that the reference doesn't come to are not predicted; they may be no more than half. Stairs go on.
        half = 2 * (len(a) - first - by) >= len(after)
        if (longer and _goes(longer.at, range(first + by, len(a) + by), after)) or (
            half
            and _goes(a.__getitem__, range(first + by, len(a)), after)
            and (stairs is None or stairs.gives(b[-by:], view.step(0) - 1 + len(a)))
        ):
            said = f"from step {step} on the LR is that of {by} steps later "
            said += f"({where_due(after[0], a[first])})"
            yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)
            if longer is None:
                yield from _often_within(view, a, b, len(a) - first - by)
            if first == 0 and by < len(a) and a[by] == max(a) and sorted(a[: by + 1]) == a[: by + 1]:
                yield Cause("another-warm-up", Fit.SEQUENCE, f"{said}, behind the reference's warm-up")
            elif first == 0 and view.is_excerpt:
                yield Cause("another-warm-up", Fit.SEQUENCE, f"{said}; {not_seen(view)}")
            return


def _often_within(view: View, a: list[float], b: list[float], least: int) -> Iterator[Cause]:
    """Several moves of the scheduler in every step, which give as many of the rates as some steps ahead do.

    Of a schedule that is no line nothing tells the rates that the reference doesn't come to.

    Args:
        view: two traces side by side.
        a: the reference's rates.
        b: the candidate's.
        least: in how many of the steps that differ the reference has to have the rate.
    """
    fitting = {some for some in range(2, MOST) if _predicted(view, a, b, [some] * len(b)) >= least}
    known = all(view.passes)
    per_pass = max(view.passes) > 1 and _predicted(view, a, b, view.passes) >= least if known else bool(fitting)
    said = f"the scheduler moves often in each step, in the steps for which the reference has such a rate ({b[0]:.4g}, "
    said += f"{b[1]:.4g}, ...)"
    if per_pass:
        yield Cause("scheduler-per-pass", Fit.SEQUENCE, said)
    if is_often(view, fitting, per_pass=per_pass):
        yield Cause("scheduler-stepped-often", Fit.SEQUENCE, said)


def _predicted(view: View, a: list[float], b: list[float], moves: list[int]) -> int:
    """For how many steps that differ the reference has the rate behind so many moves; 0 where it has another one."""
    most = 0
    # Where an excerpt begins in the schedule is not known.
    for ahead_by in range(len(a) if view.is_excerpt else 1):
        for places in _places(moves):
            due = [a[at + ahead_by] if at + ahead_by < len(a) else None for at, _ in zip(places, b, strict=False)]
            rates = [rate for rate in due[view.first :] if rate is not None]
            if all(rate is None or same(y, rate) for rate, y in zip(due, b, strict=True)) and not alike(rates, SAME):
                most = max(most, len(rates))
    return most


def ahead_at_rest(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """From the first step that differs on, the rate at which the reference comes to rest, or may behind the record.

    A schedule that is ahead by enough has it, whatever else has: one rate alone does not say where a schedule stands,
    and so this is a cause beside others.
    """
    first, rest = view.first, a[-1]
    longer = course(a, b)
    if longer is None or not all(same(rate, b[-1]) for rate in b[first:]):
        return
    if longer.is_line and first and (b[-1] - rest) * (rest - a[-2]) > 0:
        said = f"from step {view.step(first)} on the LR is {b[first]:.4g}, to which the reference's may still come"
        yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)
    if a[-2] != rest or not same(b[-1], rest):
        return
    begins = max((at for at, rate in enumerate(a) if not same(rate, rest)), default=-1) + 1
    if first < begins < first + MOST:
        said = f"from step {view.step(first)} on the LR is {b[first]:.4g}, at which the reference's rests from step "
        yield Cause("schedule-off-by-steps", Fit.SEQUENCE, f"{said}{view.step(begins)} on")


def _goes(schedule: Callable[[int], float], steps: range, rates: list[float]) -> bool:
    """Whether rates are those that a schedule has in some steps, where it isn't at rest."""
    return follows(map(schedule, steps), rates) and not alike([*map(schedule, steps)], 1e-6)


def behind(view: View, a: list[float], b: list[float], *, once: bool = False) -> Iterator[Cause]:
    """From the first step that differs on, the rates of earlier steps of the reference.

    A schedule that begins again in a step, and one that is some steps behind from the first on, may leave the same
    rates: whichever does is named. Where the rates move once (`once`), others leave them as well.
    """
    first, after = view.first, b[view.first :]
    if len(set(after)) != 2 if once else not tells(after):
        return
    if view.is_excerpt and not first:
        yield from _from_before(a, b)
    elif not first and tells(b[1:]) and equal(a[:-1], b[1:]):
        said = f"from step {view.step(1)} on the LR is that of the step before ({where_due(b[1], a[1])})"
        yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)
        # So does one step more of a warm-up that the reference has left in its first step.
        if b[0] < a[0] and same(a[0], max(a)):
            yield Cause("another-warm-up", Fit.SEQUENCE, said)
    starts = [at for at in range(first) if follows(map(a.__getitem__, range(at, len(a))), after)]
    if not starts:
        return
    by = [first - at for at in starts]
    said = f"from step {view.step(first)} on the LR goes as from step {view.step(starts[0])} on "
    said += f"({where_due(after[0], a[first])})"
    # Of an excerpt the steps before are not known, at any of which the schedule may have begun.
    # Behind a first step that was skipped the schedule has its first rate twice.
    begins = any(all(same(rate, a[0]) for rate in a[: at + 1]) for at in starts)
    if view.is_excerpt or begins or any(equal(a[: len(b) - some], b[some:]) for some in by):
        yield Cause("resume-resets-schedule", Fit.SEQUENCE, said)
    if starts[-1] > 0 or any(_waits(a, b, some) for some in by):
        yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)


def _from_before(a: list[float], b: list[float]) -> Iterator[Cause]:
    """The rates of some steps earlier in an excerpt, of which the first lie in front of it."""
    late = (by for by in range(1, len(b) // 2 + 1) if tells(b[by:]) and equal(a[: len(b) - by], b[by:]))
    by = next(late, 0)
    if by:
        said = f"the LR is that of {by} steps earlier ({where_due(b[by], a[by])})"
        # Behind a longer warm-up, too, a schedule is as many steps behind.
        names = ("schedule-off-by-steps", "resume-resets-schedule", "another-warm-up")
        yield from (Cause(it, Fit.SEQUENCE, said) for it in names)


def begun_late(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """The reference's first rate for some steps more, and behind it the others: also where it rests at first itself.

    How long both rest tells by how many steps, and of an excerpt this isn't known.
    """
    moved = [next((at for at, rate in enumerate(rates) if not same(rate, a[0])), 0) for rates in (a, b)]
    by = moved[1] - moved[0]
    if view.step(0) == 1 and moved[0] and by > 0 and _waits(a, b, by):
        said = f"the LR is that of {by} steps earlier: it rests at {a[0]:.4g} for as many more"
        yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)


def not_begun(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """A rate of 0 in all steps, with which the reference begins: a warm-up that has not begun.

    No run is given such a rate, so that a schedule has set it. By how much that is behind, and whether it would move
    later, no step of the record tells. Only a whole run says that it has not come to its end instead.
    """
    rises = next((rate for rate in a if rate), None)
    if any(b) or a[0] or rises is None or len(b) > MOST or view.is_excerpt:
        return
    said = f"the LR is 0 in every step, with which the reference's begins before it rises ({rises:.4g}, ...)"
    yield from (Cause(it, Fit.SEQUENCE, said) for it in ("schedule-off-by-steps", "scheduler-per-outer-step"))
    if not a[-1]:
        # One that is over at once may have moved often in its first step.
        yield from (Cause(name, Fit.SEQUENCE, f"{said}, and in which it ends") for name in of_many_moves(view))


def ended(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """One rate in all steps, not above the lowest of a reference that still falls at its end: a schedule that is over.

    A run that goes on behind the end of its schedule has it, and no step of the record tells by how much. One that
    falls by a factor has no end.
    """
    if view.first or len(set(b)) > 1 or not 0 <= b[0] <= min(a) or len(a) < 3:
        return
    moves = [y - x for x, y in pairwise(a[a.index(max(a)) :])]
    factors = [y / x for x, y in pairwise(a) if x]
    if (
        len(moves) > 1
        and max(moves) <= 0
        and not any(same(*pair) for pair in pairwise(a[-3:]))
        and not alike(factors, SAME)
    ):
        said = f"the LR is {b[0]:.4g} in every step, as behind the end of a schedule that falls as the reference's does"
        yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)


def _waits(a: list[float], b: list[float], steps: int) -> bool:
    """Whether all rates are those of so many steps earlier, and in front of them the reference's first."""
    return follows((a[max(0, at - steps)] for at in range(len(b))), b)


def slower(a: list[float], b: list[float], *, moves: int = 1) -> Iterator[Cause]:
    """Every rate for several steps, from which the scheduler moved so often or more, be it to the same rate."""
    if len(set(b)) == 1:
        return
    # Where the rate moves shows soonest that it does so elsewhere.
    steps = [*(at for at in range(1, len(b)) if b[at] != b[at - 1]), *range(len(b))]
    for each in range(2, min(len(b), MOST)):
        for offset in range(each):
            if (len(b) - 1 + offset) // each >= moves and all(same(b[at], a[(at + offset) // each]) for at in steps):
                yield Cause("scheduler-per-outer-step", Fit.SEQUENCE, f"the LR moves once in {each} steps")
                yield from _left_out(a, b)
                return


def _left_out(a: list[float], b: list[float]) -> Iterator[Cause]:
    """One move that was left out, where so few rates follow that a slower scheduler has them, too."""
    at = next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if not same(y, x)), 0)
    if at and not tells(b[at:]) and equal(a[at - 1 : -1], b[at:]):
        said = f"the LR is that of the step before from the one with {b[at]:.4g} (due {a[at]:.4g}) on"
        yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)


def faster(view: View, a: list[float], b: list[float], *, beside: bool = False) -> Iterator[Cause]:
    """Several moves of the scheduler in every step, or a schedule that is over in so many times fewer steps.

    Once a schedule has come to rest, many numbers of moves may lead there: passes are one where they are among them.
    Beside others that give the rates (`beside`), how often doesn't need to be known.
    """
    longer = course(a, b)
    if longer is None or (len(set(b)) == 1 and not same(a[-1], a[-2])):
        return
    begun = _begun(view, longer, b[0])
    fitting = [some for some in range(2, MOST) if _moved(longer, b, repeat(some, len(b)), begun)]
    # Of passes that no log has written down the number may be any.
    known = all(view.passes)
    per_pass = max(view.passes) > 1 and _moved(longer, b, view.passes, begun) if known else bool(fitting)
    # Where the reference has not come to rest, the rate at which it will is read off the candidate: of two rates, the
    # other one must say how often.
    if not (beside or tells(b) or same(a[-1], a[-2])) and len(fitting) != 1:
        return
    told = f"{' or '.join(map(str, fitting[:3]))} times in each step" if fitting else "once for each pass"
    said = f"the scheduler moves {told} ({b[0]:.4g}, {b[1]:.4g}, ...)"
    if per_pass:
        passes = f"windows have {', '.join(map(str, sorted(set(view.passes))))}" if known else "no log says how many"
        yield Cause("scheduler-per-pass", Fit.SEQUENCE, f"{said}; {passes} passes")
    if is_often(view, {*fitting}, per_pass=per_pass):
        yield Cause("scheduler-stepped-often", Fit.SEQUENCE, said)
    # Of an excerpt it is not known in which step the shorter one began.
    if len(set(b)) > 1 and any(len(begun) > 1 or _is_shorter(longer, b, some) for some in fitting):
        yield Cause("schedule-too-short", Fit.SEQUENCE, said)


def is_often(view: View, times: set[int], *, per_pass: bool) -> bool:
    """Return whether a scheduler that is stepped by mistake may have moved so often in each step.

    Passes explain their number alone, but for two numbers that a scheduler is often stepped: twice, and once a rank.

    Args:
        view: two traces side by side.
        times: how often it may have moved in each step.
        per_pass: whether a move for each pass explains it.
    """
    return bool(times - (set(view.passes) if per_pass else set()) or {2, view.ranks} & times)


def _is_shorter(longer: Course, b: list[float], times: int) -> bool:
    """Whether a schedule for so many times fewer steps gives the rates: it begins where the reference's does.

    That is in its first step, or in the one before, of which a line alone tells the rate.
    """
    begun, before = _places(repeat(times, len(b)))
    return follows(map(longer.at, begun), b) or (longer.is_line and follows(map(longer.at, before), b))


def _begun(view: View, longer: Course, rate: float) -> list[int]:
    """By how many places a candidate's schedule may be ahead before the first step that is recorded; 0 of a whole run.

    Of an excerpt its first rate tells it: at most it has moved as often as is looked for in each step before.
    """
    most = min((view.step(0) - 1) * MOST, _FARTHEST)
    there = (some for some in range(1, most) if same(longer.at(some), rate))
    return [0, *islice(there, _BEGUN)]


def _moved(longer: Course, b: list[float], moves: Iterable[int], begun: Iterable[int]) -> bool:
    """Whether a scheduler that makes so many moves in each step, from one of some places on, gives the rates."""
    made = [*moves]
    return any(follows((longer.at(ahead + at) for at in places), b) for ahead in begun for places in _places(made))


def _places(moves: Iterable[int]) -> tuple[Iterator[int], Iterator[int]]:
    """Return where a scheduler stands in each step that makes so many moves in it.

    The rate of a step is that before its moves, or that before the last of them, with which the optimizer steps.
    """
    first, last = tee(accumulate(moves))
    return chain((0,), first), (end - 1 for end in last)
