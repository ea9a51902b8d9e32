"""The same windows with another learning rate: which reading of the reference's schedule gives the candidate's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, takewhile

from ds_parity.parity.diagnosis.causes import Cause, as_one_group
from ds_parity.parity.diagnosis.effects import TRAINED_ON
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.gradient import agreeing
from ds_parity.parity.diagnosis.nearness import alike, near, told
from ds_parity.parity.diagnosis.rates import MOST, SAME, as_fp32, equal, finite, same, tells, where_due
from ds_parity.parity.diagnosis.schedule_excerpts import beside_a_factor, beside_a_rest, not_seen
from ds_parity.parity.diagnosis.schedule_families import of_a_family
from ds_parity.parity.diagnosis.schedule_positions import (
    ahead,
    ahead_at_rest,
    begun_late,
    behind,
    ended,
    faster,
    not_begun,
    slower,
)
from ds_parity.parity.diagnosis.schedule_rests import without_one_rest, without_repeats, without_rests
from ds_parity.parity.diagnosis.schedule_shapes import ends, stretched, warm_up
from ds_parity.parity.diagnosis.schedule_stairs import by_stairs
from ds_parity.parity.diagnosis.second_fault import norms_stay, not_by_the_rate, proves, too_sudden
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import Trace

_ROUNDING = 1e-12
_AT_ONE_PACE = {
    "schedule-off-by-steps", "resume-resets-schedule", "lr-reported-a-step-off", "reported-lr", "lr-rounded",
}  # fmt: skip


@dataclass(frozen=True)
class _Log:
    """What the record shows of whether the logged rates were trained with.

    Attributes:
        view: two traces side by side.
        before: their steps in front of a second fault, in which the rate alone differs; None where none is.
    """

    view: View
    before: View | None

    @cached_property
    def proof(self) -> View | None:
        """The steps that prove that the rates were the same, and in which nothing else differs; None: none do."""
        return next((view for view in (self.view, self.before) if view is not None and proves(view)), None)

    @property
    def if_its_own(self) -> View | None:
        """The steps that prove it if the log is of the rates that its own steps used, not of those of the next ones."""
        return next((view for view in (self.view, self.before) if view is not None and view.updated_alike), None)

    @property
    def alone_wrong(self) -> bool:
        """Whether no other rates were trained with, so that the log alone is wrong."""
        return self.proof is not None

    @property
    def stretch(self) -> str:
        """Where the rates are proved to be the same, in words."""
        if self.proof is self.view or self.before is None:
            return "in every step"
        return f"up to step {self.before.step(-1)}, where such rates would have shown; behind it lies a second fault"


def causes(view: View) -> Iterator[Cause]:
    """Yield what makes the candidate's learning rates, all of them, from those of the reference."""
    if "lr" not in view.at_first or "skipped" in view.at_first:
        return
    rates = [(x.lr, y.lr) for x, y in view.pairs if x.lr and y.lr and len(x.lr) == len(y.lr)]
    if len(rates) < len(view.pairs) or len(rates) < 2 or len({len(x) for x, _ in rates}) > 1:
        return
    sides = ([list(of_group) for of_group in zip(*side, strict=True)] for side in zip(*rates, strict=True))
    groups = list(zip(*sides, strict=True))
    # Lists are compared by identity first: a NaN that both share would be equal to itself.
    other = [(a, b) for a, b in groups if any(x != y for x, y in zip(a, b, strict=True))]
    if all(as_fp32(a, b) for a, b in other):
        if view.rates_agree_to_fp32:
            yield from _rounded_to_fp32(view, *other[0])
        return
    kept = [a for a, b in groups if all(x == y for x, y in zip(a, b, strict=True))]
    # Weights that agree say nothing of the one group whose rates are others, if it holds little of the gradient.
    log = _Log(view, None if kept else view.alone("lr"))
    found = [] if log.alone_wrong or not _finite(other) else [*_of_some_groups(view, other, kept)]
    if _show_no_schedule(kept):
        found += _of_all_groups(log, other)
    if _exchanged(groups):
        # Two groups that go at each other's pace go at no one pace.
        found = [it for it in found if it.name in _AT_ONE_PACE]
        if not log.alone_wrong:
            found.append(Cause("group-lr", Fit.SEQUENCE, "the parameter groups have each other's LR in every step"))
    if not found and log.if_its_own is view:
        # What no cause gives, and no weights or norms show, is logged wrong, be the log of these steps.
        found = [*_logged_wrong(log)]
    elif found and all(cause.kind != "logging" for cause in found):
        found += [replace(it, fit=found[0].fit) for it in _logged_wrong(log)]
    yield from as_one_group(found)  # each gives all of the rates


def without_rounding_of_rates(view: View) -> Trace | None:
    """Return the candidate with the reference's learning rates, where they differ by rounding to fp32 alone.

    Args:
        view: two traces side by side.

    Returns:
        None where they differ otherwise or not at all, or where nothing else differs that is trained on.
    """
    if "lr" not in view.fields or not view.fields & TRAINED_ON - {"lr"} or not view.same_windows:
        return None
    rates = [(x.lr, y.lr) for x, y in view.pairs if x.lr is not None or y.lr is not None]
    if any(not x or not y or len(x) != len(y) for x, y in rates) or len({len(x) for x, _ in rates if x}) > 1:
        return None
    if not as_fp32(*(list(chain.from_iterable(pair[side] or () for pair in rates)) for side in (0, 1))):
        return None
    due = {y.step: x.lr for x, y in view.pairs}
    steps = [step.model_copy(update={"lr": due.get(step.step, step.lr)}) for step in view.candidate.steps]
    return replace(view.candidate, steps=tuple(steps))


def _rounded_to_fp32(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """Rates that differ by rounding to fp32 alone, which moves nothing that training in fp32 shows."""
    at = next(at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    said = f"the learning rates agree to fp32: one side's are the other's, rounded to it ({b[at]!r}, where {a[at]!r} "
    said += "was due)"
    if view.updated_alike:
        yield Cause("reported-lr", Fit.ALONE, f"{said}, and {agreeing(view)} agree in every step")
    else:
        yield from (Cause(name, Fit.SEQUENCE, said) for name in ("reported-lr", "lr-rounded"))


def _logged_wrong(log: _Log) -> Iterator[Cause]:
    """A wrong logged rate beside what makes such rates: nothing else needs them, or something needs another fault."""
    view = log.view
    agree = agreeing(view) if view.fields == {"lr"} else ""
    if agree:
        said = f"the logged LR alone is another: {agree} agree in every step, where other rates may show too little"
        yield Cause("reported-lr", Fit.SEQUENCE, said)
    elif log.if_its_own is not None:
        agreed = f"{agreeing(log.if_its_own)} agree up to step {log.if_its_own.step(-1)}"
        said = f"the logged LR alone is another, beside a second fault: {agreed}"
        yield Cause("reported-lr", Fit.SEQUENCE, f"{said}, unless the log is of the rate that the next step uses")
    elif said := not_by_the_rate(view) or norms_stay(view) or _too_sudden(log):
        yield Cause("reported-lr", Fit.SEQUENCE, f"the logged LR alone is another, beside a second fault: {said}")


def _too_sudden(log: _Log) -> str:
    return "" if log.before is None else too_sudden(log.view, log.before)


def _exchanged(groups: Sequence[tuple[list[float], list[float]]]) -> bool:
    """Whether the parameter groups of both sides have the same rates, some of them those of another group."""
    a, b = ([rates[side] for rates in groups] for side in (0, 1))
    return not all(equal(x, y) for x, y in groups) and all(
        equal(x, y) for x, y in zip(sorted(a), sorted(b), strict=True)
    )


def _finite(groups: Sequence[tuple[list[float], list[float]]]) -> bool:
    return all(finite(rates) for sides in groups for rates in sides)


def _of_all_groups(log: _Log, groups: Sequence[tuple[list[float], list[float]]]) -> list[Cause]:
    """What gives the rates of every parameter group: what gives those of one alone doesn't give the record."""
    known = _finite(groups)
    (a, b), *others = groups
    found = _of_all(log, a, b, known=known)
    for a, b in others:
        if not found:
            break
        # Where numbers are rounded shows in their digits, all else in how they lie to one another.
        if known and _is_multiple((a, b), groups[0]) and all(it.name != "lr-rounded" for it in found):
            continue
        names = {cause.name for cause in _of_all(log, a, b, known=known)}
        found = [cause for cause in found if cause.name in names]
    return found


def _is_multiple(one: tuple[list[float], list[float]], other: tuple[list[float], list[float]]) -> bool:
    """Whether all rates of a parameter group, on both sides, are so many times another's."""
    pairs = [pair for of_one, of_other in zip(one, other, strict=True) for pair in zip(of_one, of_other, strict=True)]
    factors = [x / y for x, y in pairs if y]
    return all(y or not x for x, y in pairs) and alike(factors, _ROUNDING) and factors[0] > 0


def _show_no_schedule(kept: list[list[float]]) -> bool:
    """Whether parameter groups whose rates agree, if there are any, would so whatever a schedule did: of one rate."""
    return all(len({*rates}) == 1 for rates in kept)


def _of_some_groups(
    view: View, other: list[tuple[list[float], list[float]]], kept: list[list[float]]
) -> Iterator[Cause]:
    """What a factor of all rates that differ comes of; `kept`: those of the parameter groups that agree."""
    factors = [y / x for a, b in other for x, y in zip(a, b, strict=True) if x]
    # No factor makes another rate of 0.
    if not alike(factors, SAME) or any(y for a, b in other for x, y in zip(a, b, strict=True) if not x):
        return
    # What factors are off from 1 by is theirs only if they lie nearer to one another, and no rounding.
    if max(_ROUNDING, max(factors) - min(factors)) >= abs(factors[0] - 1):
        return
    said = f"the LR of {len(other)} of {len(other) + len(kept)} parameter groups is {told(factors[0])} times the "
    said += "reference's in every step, that of the others agrees"
    if kept:
        yield Cause("group-lr", Fit.SEQUENCE, said)
    # What one rate alone shows is as many times any other.
    if len(factors) < 2:
        return
    if not any(chain.from_iterable(kept)):
        ranks = f", and {view.ranks} is the number of ranks" if view.ranks > 1 and near(factors[0], view.ranks) else ""
        # 0 is as many times any number: it is said as it is.
        times = f"{told(factors[0])} times the reference's" if factors[0] else "0"
        said = f"the LR is {times} in every step{ranks}"
        yield Cause("base-lr", Fit.SEQUENCE, said)
    if _show_no_schedule(kept):
        before = [beside_a_factor(view, a, factors[0]) for a, _ in other]
        common = (name for name in before[0] if all(name in names for names in before))
        yield from (Cause(name, Fit.SEQUENCE, f"{said}; {not_seen(view)}") for name in common)


def _of_all(log: _Log, a: list[float], b: list[float], *, known: bool) -> list[Cause]:
    """What gives the rates of a parameter group; unless all rates are `known`, only what is logged."""
    view, found = log.view, [*_logged_off(log, a, b)]
    if not found and log.proof is not None:
        at = next(at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        said = f"the logged LR differs ({where_due(b[at], a[at])}), and {agreeing(log.proof)} agree "
        found = [Cause("reported-lr", Fit.ALONE, said + log.stretch)]
    elif found and (not tells(a) or (log.alone_wrong and _one_ratio(a[view.first :], b[view.first :]))):
        # Rates of an exponential schedule are those of another step, and so many times their own. One rate that is
        # that of the next step may be so by chance.
        found += [replace(found[0], name="reported-lr")]
    # Rates that differ by rounding alone are those of any place and shape that is near enough.
    if known and not log.alone_wrong and not equal(a, b):
        found += [*_skipped(view, a, b), *_still(view, a, b)]
        found += _of_a_schedule(*without_rests(view, a, b), beside=bool(found))
        # What a skipped step left may not be told as one, nor in how many steps a scheduler moves once by intention.
        for rested in (without_one_rest(view, a, b), without_repeats(view, a, b)):
            if rested is not None:
                found += _of_a_schedule(*rested, beside=bool(found))
    return list({cause.name: cause for cause in reversed(found)}.values())[::-1]


def _of_a_schedule(view: View, a: list[float], b: list[float], *, beside: bool) -> list[Cause]:
    """What gives the rates as places or as another shape of the reference's schedule; `beside`: something else does."""
    # Behind a skipped step a schedule that goes on is ahead: `_skipped` says so.
    found = [*([] if _before(view) else ahead(view, a, b)), *behind(view, a, b)]
    found += [*not_begun(view, a, b), *ended(view, a, b), *_per_rollout(view, a, b), *faster(view, a, b)]
    found += [*stretched(view, a, b), *by_stairs(view, a, b), *ends(view, a, b), *warm_up(a, b)]
    others = beside or bool(found)
    found += _moved_once(view, a, b, beside=others) if _once(b) else [*slower(a, b), *begun_late(view, a, b)]
    found += of_a_family(view, a, b)
    if not (beside or found) or _before(view):
        return found
    named = {cause.name for cause in found}
    often = (cause for cause in faster(view, a, b, beside=True) if cause.name not in named)
    return [*found, *ahead_at_rest(view, a, b), *often]


def _moved_once(view: View, a: list[float], b: list[float], *, beside: bool) -> Iterator[Cause]:
    """What gives the rates as well as others do (`beside`), and what one move and those to the same rate show.

    One move alone shows no period. Nor do those to the same rate, if the reference also rests at the one that follows:
    where in its schedule the candidate stands isn't seen then, and other lengths of such rests give its rates.
    """
    periods = [*slower(a, b, moves=1 if beside else 2)]
    others = [*behind(view, a, b, once=True), *begun_late(view, a, b)]
    if beside or others or sum(same(rate, b[-1]) for rate in a) == 1:
        yield from periods
    if beside or periods:
        yield from others


def _one_ratio(a: list[float], b: list[float]) -> bool:
    return alike([y / x for x, y in zip(a, b, strict=True) if x], SAME)


def _once(rates: list[float]) -> bool:
    """Whether a schedule moves once at most: in which steps it would move again is not seen, nor that it would."""
    return sum(x != y for x, y in pairwise(rates)) < 2


def _logged_off(log: _Log, a: list[float], b: list[float]) -> Iterator[Cause]:
    # A scheduler that is really a step off trains otherwise, and what it trains shows it: weights at once, the norm
    # where it is written in full, a loss of four digits hardly.
    view = log.view if log.proof is None else log.proof
    agree = view.compared_after_the_first
    # Of two rates, that no other ones were trained with has to be known: a schedule may stand at either for any reason.
    if view.fields - {"lr"} or not agree or not (tells(a) or log.alone_wrong or log.if_its_own is view):
        return
    where = "" if log.proof is None or log.proof is log.view else f" {log.stretch}"
    for logged, due, own, when in ((b[:-1], a[1:], a[:-1], "next"), (b[1:], a[:-1], a[1:], "step before")):
        if not equal(due, logged) or equal(due, own):
            continue
        listed = ", ".join(f"{rate:.4g}" for rate in logged[:2]) + (", ..." if logged[2:] else "")
        said = f"the LR of each step is that of the {when} ({listed}); {', '.join(agree)} agree{where}"
        yield Cause("lr-reported-a-step-off", Fit.SEQUENCE, said)


def _before(view: View) -> bool:
    """Whether a step before the first that differs was skipped, behind which the reference's rates were the same."""
    return _skipped_before(view) > 0


def _skipped_before(view: View) -> int:
    """How many steps in front of the first that differs were skipped while the reference had one rate."""
    before = [one for one, _ in view.pairs[: view.first]][::-1]
    return sum(bool(one.skipped) for one in takewhile(lambda one: one.lr == before[0].lr, before))


def _skipped(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    for by in range(1, _skipped_before(view) + 1):
        known = a[view.first + by :]
        if known and equal(known, b[view.first : -by]):
            ahead_by = "a step" if by == 1 else f"{by} steps"
            said = (
                f"{ahead_by} in front of step {view.step(view.first)} {'was' if by == 1 else 'were'} skipped, and from "
            )
            said += f"there on the LR is {ahead_by} ahead"
            yield Cause("scheduler-on-skipped-step", Fit.SEQUENCE, said)
            return


def _still(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    fitting = [some for some in range(1, 8) if equal([round(it, some) for it in a], b)]
    if fitting and not any(b):
        said = f"the LR is 0 in every step, as the reference's is, rounded to {fitting[-1]} decimals or less"
        yield Cause("lr-rounded", Fit.SEQUENCE, said)
    elif fitting and not equal(a, b):
        said = f"the LR is the reference's, rounded to {fitting[0]} decimals ("
        said += next(where_due(y, x) for x, y in zip(a, b, strict=True) if not same(y, x)) + ")"
        yield Cause("lr-rounded", Fit.SEQUENCE, said)
        if len({*b}) > 1 and len({*b[view.first :]}) == 1:
            # One rate may as well be that of a schedule which doesn't go on, or hardly.
            said = f"the LR is {b[-1]:.6g} from step {view.step(view.first)} on, where the reference's moves"
            yield from (Cause(it, Fit.SEQUENCE, said) for it in ("no-scheduler", "schedule-too-long"))
    if len(set(b)) == 1 and len(set(a)) > 1:
        said = f"the LR is {b[0]:.6g} in every step, where the reference's moves"
        # Two rates are one number in other schedules, too.
        yield Cause("no-scheduler", Fit.SEQUENCE if len(b) > 2 else Fit.CONSTANT, said)
        for name in beside_a_rest(view, a, b[0]):
            yield Cause(name, Fit.SEQUENCE, f"{said}; {not_seen(view)}")
        if b[0] == a[0] and view.step(0) == 1 and len(b) <= MOST:
            yield Cause("scheduler-per-outer-step", Fit.SEQUENCE, f"{said}, and may move behind so many of them")
            # A schedule that begins with a rest has the same rate where it is behind, or begins again.
            if same(a[1], a[0]):
                for name in ("schedule-off-by-steps", "resume-resets-schedule"):
                    yield Cause(name, Fit.SEQUENCE, f"{said}, as in its first steps")


def _per_rollout(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    rollouts = [pair[0].rollouts or 0 for pair in view.pairs][:-1]
    moved = [(y - x, count) for (x, y), count in zip(pairwise(a), rollouts, strict=True) if y != x and count][1:]
    whole = [y - x for x, y in pairwise(b) if y != x][:3]
    # One move is alike whatever moves it, and moves behind windows of one size are as well those of steps.
    if len({count for _, count in moved}) < 2 or len(whole) < 2:
        return
    if alike([move / count for move, count in moved], 1e-3) and alike(whole, 1e-6):
        said = f"the reference's LR moves with the rollouts of each window ({rollouts}), the candidate's by whole steps"
        yield Cause("scheduler-per-dynamic-step", Fit.SEQUENCE, said)
