"""The same windows with another learning rate: which reading of the reference's schedule gives the candidate's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.view import View, alike, near, told

# Learning rates are computed, not measured: what is the same differs by rounding alone.
_SAME = 1e-6
_MOST = 64  # times that a scheduler may move in one step


def causes(view: View) -> Iterator[Cause]:
    """Yield what makes the candidate's learning rates, all of them, from those of the reference."""
    if "lr" not in view.at_first or "skipped" in view.at_first:
        return
    rates = [(x.lr, y.lr) for x, y in view.pairs if x.lr and y.lr and len(x.lr) == len(y.lr)]
    if len(rates) < len(view.pairs) or len(rates) < 2 or len({len(x) for x, _ in rates}) > 1:
        return
    groups = [([x[at] for x, _ in rates], [y[at] for _, y in rates]) for at in range(len(rates[0][0]))]
    other = [(a, b) for a, b in groups if a != b]
    if not view.updated_alike:
        yield from _of_some_groups(view, groups, other)
    if len(other) == len(groups):
        yield from _of_all(view, *other[0])


def _of_some_groups(
    view: View, groups: Sequence[object], other: list[tuple[list[float], list[float]]]
) -> Iterator[Cause]:
    factors = [y / x for a, b in other for x, y in zip(a, b, strict=True) if x]
    # No factor makes another rate of 0.
    if not alike(factors, _SAME) or any(y for a, b in other for x, y in zip(a, b, strict=True) if not x):
        return
    if len(other) < len(groups):
        said = f"the LR of {len(other)} of {len(groups)} parameter groups is {told(factors[0])} times the reference's "
        yield Cause("group-lr", Fit.SEQUENCE, f"{said}in every step, that of the others agrees")
    elif len(factors) > 1:
        ranks = f", and {view.ranks} is the number of ranks" if view.ranks > 1 and near(factors[0], view.ranks) else ""
        yield Cause("base-lr", Fit.SEQUENCE, f"the LR is {told(factors[0])} times the reference's in every step{ranks}")


def _of_all(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    found = [*_logged_off(view, a, b)]
    if not found and view.updated_alike:
        said = f"the logged LR differs ({b[0]:.4g}, where {a[0]:.4g} was due), and the weights agree in every step"
        found = [Cause("reported-lr", Fit.ALONE, said)]
    if not view.updated_alike:
        found += [*_shifted(view, a, b), *_skipped(view, a, b), *_still(view, a, b), *_per_rollout(view, a, b)]
        found += [*_slower(a, b), *_faster(view, a, b), *_stretched(view, a, b)]
    # Each gives all of the rates, so that none is likelier than another.
    said = "; or ".join(dict.fromkeys(cause.evidence for cause in found))
    yield from (replace(cause, evidence=said) for cause in found)


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(near(y, x, _SAME) for x, y in zip(one, other, strict=True))


def _tells(values: Sequence[float]) -> bool:
    """Whether rates say where in a schedule they stand: two that are alike may be anywhere."""
    return len(set(values)) > 2


def _logged_off(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    # A scheduler that is really a step off trains otherwise, and what it trains shows it: weights at once, the norm
    # where it is written in full, a loss of four digits hardly.
    agree = view.compared_after_the_first
    if view.fields - {"lr"} or not _tells(a) or not agree:
        return
    for logged, due, when in ((b[:-1], a[1:], "next"), (b[1:], a[:-1], "step before")):
        if not _equal(due, logged):
            continue
        said = f"the LR of each step is that of the {when} ({logged[0]:.4g}, {logged[1]:.4g}, ...); "
        said += f"{', '.join(agree)} agree"
        yield Cause("lr-reported-a-step-off", Fit.SEQUENCE, said)


def _shifted(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """From the first step that differs on, the rates of other steps of the reference."""
    first = view.first
    after, step = b[first:], view.step(first)
    line = _line(a, b)
    for by in range(1, _MOST if line else len(a) - first):
        known = [line.at(at + by) for at in range(first, len(a))] if line else a[first + by :]
        if not alike(known, _SAME) and _equal(known, after[: len(known)]) and not _before(view):
            said = f"from step {step} on the LR is that of {by} steps later "
            yield Cause("schedule-off-by-steps", Fit.SEQUENCE, f"{said}({after[0]:.4g}, where {a[first]:.4g} was due)")
            return
    for at in range(first):
        if len(set(after)) > 1 and _equal(a[at : at + len(after)], after):
            said = f"from step {step} on the LR goes as from step {view.step(at)} on "
            said += f"({after[0]:.4g}, where {a[first]:.4g} was due)"
            yield Cause("resume-resets-schedule", Fit.SEQUENCE, said)
            if at:
                yield Cause("schedule-off-by-steps", Fit.SEQUENCE, said)
            return


def _before(view: View) -> bool:
    """Whether the step before the first that differs was skipped."""
    return view.first > 0 and bool(view.pairs[view.first - 1][0].skipped)


def _skipped(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    known = a[view.first + 1 :]
    if _before(view) and known and _equal(known, b[view.first : -1]):
        said = f"step {view.step(view.first - 1)} was skipped, and from step {view.step(view.first)} on the LR is "
        said += "a step ahead"
        yield Cause("scheduler-on-skipped-step", Fit.SEQUENCE, said)


def _still(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    for decimals in range(1, 8):
        rounded = [round(it, decimals) for it in a]
        if _equal(rounded, b) and not _equal(rounded, a):
            said = f"the LR is the reference's, rounded to {decimals} decimals ({b[0]:.6g}, where {a[0]:.6g} was due)"
            yield Cause("lr-rounded", Fit.SEQUENCE, said)
            break
    if len(set(b)) == 1 and len(set(a)) > 1:
        yield Cause("no-scheduler", Fit.SEQUENCE, f"the LR is {b[0]:.6g} in every step, where the reference's moves")


def _per_rollout(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    moves_a = [y - x for x, y in pairwise(a)]
    moves_b = [y - x for x, y in pairwise(b)]
    rollouts = [pair[0].rollouts or 0 for pair in view.pairs][:-1]
    shares = [move / count for move, count in zip(moves_a, rollouts, strict=True) if move and count]
    if len(set(rollouts)) > 1 and alike(shares[1:], 1e-3) and alike([m for m in moves_b if m][:3], 1e-6):
        said = f"the reference's LR moves with the rollouts of each window ({rollouts}), the candidate's by whole steps"
        yield Cause("scheduler-per-dynamic-step", Fit.SEQUENCE, said)


def _slower(a: list[float], b: list[float]) -> Iterator[Cause]:
    """Every rate for several steps."""
    if len(set(b)) == 1:
        return
    for each in range(2, min(len(b), _MOST)):
        for offset in range(each):
            if all(near(y, a[(at + offset) // each], _SAME) for at, y in enumerate(b)):
                yield Cause("scheduler-per-outer-step", Fit.SEQUENCE, f"the LR moves once in {each} steps")
                return


@dataclass(frozen=True)
class _Line:
    """The reference's schedule beyond its last step: it goes on as it went last, to no more than a highest rate."""

    known: list[float]
    highest: float

    def at(self, step: int) -> float:
        if step < len(self.known):
            return self.known[step]
        beyond = self.known[-1] + (step - len(self.known) + 1) * (self.known[-1] - self.known[-2])
        return min(beyond, self.highest)


def _line(a: list[float], b: list[float]) -> _Line | None:
    """The reference's schedule as a line, if its last two moves are; up to the rate at which the candidate stays."""
    moves = [y - x for x, y in pairwise(a)][-2:]
    if len(moves) < 2 or not moves[0] or not near(moves[1], moves[0], 1e-6):
        return None
    return _Line(a, max(b) if b[-1] == b[-2] else float("inf"))


def _faster(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    """Several moves of the scheduler in every step."""
    line = _line(a, b)
    if line is None or len(set(b)) == 1:
        return
    passes = view.passes[view.first]
    for times in range(2, _MOST):
        for before in (0, times - 1):
            places = [before + times * at for at in range(len(b))]
            if not all(near(y, line.at(at), 1e-6) for at, y in zip(places, b, strict=True)):
                continue
            said = f"the scheduler moves {times} times in each step ({b[0]:.4g}, {b[1]:.4g}, ...)"
            if passes == times:
                yield Cause("scheduler-per-pass", Fit.SEQUENCE, f"{said}; windows have {passes} passes")
            if passes != times or times == 2:
                yield Cause("scheduler-stepped-often", Fit.SEQUENCE, said)
            return


def _stretched(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    moves = [(y - x, w - v) for (x, y), (v, w) in zip(pairwise(a), pairwise(b), strict=True)]
    paces = [x / y for x, y in moves if x and y]
    if len(paces) > 1 and alike(paces, 1e-6) and paces[0] > 1.2:
        passes = max(view.passes)
        said = f"the LR moves {paces[0]:.5g} times too slowly"
        if near(paces[0], passes, 1e-3):
            yield Cause("scheduler-budget-in-passes", Fit.SEQUENCE, f"{said}; windows have {passes} passes")
        else:
            yield Cause("schedule-too-long", Fit.SEQUENCE, said)
