"""Two traces brought to the same steps: a foreign trainer may log one step in ten, with the mean loss of all ten."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ds_parity.trace import StepRecord, Trace

NO_ROLLOUTS = {
    counted: f"the reference counts no rollouts: bounds depend on them, and they are {other}"
    for counted, other in ((True, "those of the candidate"), (False, "unknown, and each step is taken for one"))
}
"""What is said of a reference that counts none, by whether the candidate does."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """Both traces without the steps that the other doesn't log, and what to know of it.

    `terms` is, for every step, how many rollouts were summed up to and including it. `averaged` says that losses are
    means of those that were logged: other numbers than a trainer writes.
    """

    reference: Trace
    candidate: Trace
    terms: dict[int, int]
    notes: tuple[str, ...]
    averaged: bool = False


def align(reference: Trace, candidate: Trace) -> Aligned:
    """Leave out steps that a foreign trace doesn't log, and bring losses to means over the same steps.

    A foreign trace logs one step in so many, the distance that most of its steps have. A step that it lacks is left out
    of the other trace only where none was due: one that is missing, and all that follow an early end, stay. Where its
    loss is the mean over the steps since the one before it, so becomes the other's; where it can't, for want of a
    step, the loss is unknown. A single LR is checked against each of several parameter groups.
    """
    a, b = _unlogged(reference, candidate), _unlogged(candidate, reference)
    notes = (*_gap_notes("candidate", candidate, a), *_gap_notes("reference", reference, b))
    mean_a, mean_b = _means(reference, candidate)
    kept_a = tuple(_with_loss(one, mean_a) for one in reference.steps if one.step not in a)
    kept_b = tuple(_with_loss(one, mean_b) for one in candidate.steps if one.step not in b)
    groups = max((len(one.lr or ()) for one in (*kept_a, *kept_b)), default=0)
    return Aligned(
        replace(reference, steps=_grouped(reference, kept_a, groups)),
        replace(candidate, steps=_grouped(candidate, kept_b, groups)),
        _terms(reference, candidate),
        (
            *notes,
            *_mean_notes("reference", reference, mean_a),
            *_mean_notes("candidate", candidate, mean_b),
            *_group_notes("reference", reference, groups),
            *_group_notes("candidate", candidate, groups),
            *_term_notes(reference, candidate),
        ),
        averaged=bool(mean_a or mean_b),
    )


def _steps(trace: Trace) -> list[int]:
    return sorted({record.step for record in trace.steps})


def stride(trace: Trace) -> int:
    """One step in so many is logged: the distance that most steps have, or what the trace says of a single step."""
    distances = Counter(b - a for a, b in pairwise(_steps(trace)))
    if not distances:
        return trace.every or 1
    most = max(distances.values())
    return min(distance for distance, times in distances.items() if times == most)


def _unlogged(trace: Trace, other: Trace) -> set[int]:
    """Steps of a trace that the other, foreign one lacks and was not due to log."""
    if not other.header.foreign or not other.steps:
        return set()
    logged, apart = _steps(other), stride(other)
    missing = set(_steps(trace)).difference(logged)
    return {step for step in missing if (step - _before(logged, step)) % apart}


def _before(logged: Sequence[int], step: int) -> int:
    """The last step logged before one, or the first of all."""
    return logged[max(bisect_left(logged, step) - 1, 0)]


def _means(reference: Trace, candidate: Trace) -> tuple[dict[int, float | None], dict[int, float | None]]:
    """The losses of both traces, over the same steps, for every step at which one of them is a mean over several."""
    begins = [_begins(trace) for trace in (reference, candidate)]
    common = begins[0].keys() & begins[1].keys()
    wide = {step: _common(step, *begins) for step in common if begins[0][step] != begins[1][step]}
    return _over(reference, begins[0], wide), _over(candidate, begins[1], wide)


def _common(step: int, *begins: dict[int, int]) -> int:
    """The last step before one after which means of both traces begin; the earlier of their own where there is none.

    Losses of every fourth and of every sixth step are means over other steps, and those up to step 12 over the same.
    """
    one, other = (begin[step] for begin in begins)
    while one != other:
        earlier = begins[0].get(one) if one > other else begins[1].get(other)
        if earlier is None:
            return min(begin[step] for begin in begins)
        one, other = (earlier, other) if one > other else (one, earlier)
    return one


def _begins(trace: Trace) -> dict[int, int]:
    """Step to the step after which its loss begins: the one before it, unless the loss is a mean over several."""
    steps = _steps(trace)
    if not trace.mean_loss or not steps:
        return {step: step - 1 for step in steps}
    return dict(zip(steps, [max(steps[0] - stride(trace), 0), *steps], strict=False))


def _over(trace: Trace, begins: dict[int, int], wide: dict[int, int]) -> dict[int, float | None]:
    losses = {record.step: record.loss for record in trace.steps}
    return {step: _mean(step, begin, begins, losses) for step, begin in wide.items()}


def _mean(step: int, begin: int, begins: dict[int, int], losses: dict[int, float | None]) -> float | None:
    """The mean loss of the steps after `begin` up to `step`; None where one of them isn't known."""
    parts, at = [], step
    while at > begin:
        loss = losses.get(at)
        if loss is None or begins[at] < begin:
            return None
        parts.append(loss * (at - begins[at]))
        at = begins[at]
    if begin == begins[step]:
        return losses[step]
    total = math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)
    return total / (step - begin)


def _with_loss(record: StepRecord, means: dict[int, float | None]) -> StepRecord:
    return record.model_copy(update={"loss": means[record.step]}) if record.step in means else record


def _grouped(trace: Trace, steps: tuple[StepRecord, ...], groups: int) -> tuple[StepRecord, ...]:
    if not trace.header.foreign:
        return steps
    return tuple(
        one.model_copy(update={"lr": one.lr * groups}) if one.lr is not None and len(one.lr) == 1 else one
        for one in steps
    )


def _terms(reference: Trace, candidate: Trace) -> dict[int, int]:
    """Rollouts so far, of the reference, or of the candidate where the reference counts none; else steps."""
    counting = next((trace for trace in (reference, candidate) if _counts(trace)), None)
    rollouts = {record.step: record.rollouts or 0 for record in counting.steps} if counting else {}
    steps = sorted({*_steps(reference), *_steps(candidate)})
    terms, total = {}, 0
    for step in steps:
        total = total + rollouts.get(step, 0) if counting else step - steps[0] + 1
        terms[step] = total
    return terms


def _counts(trace: Trace) -> bool:
    return any(record.rollouts is not None for record in trace.steps)


def _gap_notes(name: str, trace: Trace, unlogged: set[int]) -> Iterator[str]:
    if unlogged:
        yield (
            f"the {name} ({trace.header.engine}) logs one step in {stride(trace)}: {len(unlogged)} steps that it does "
            "not log are left out"
        )
        if not trace.mean_loss:
            yield (
                f"the {name}'s loss is taken for that of the logged step alone; if it is the mean over the steps since "
                "the one logged before, write --mean-loss"
            )


def _mean_notes(name: str, trace: Trace, means: dict[int, float | None]) -> Iterator[str]:
    if any(step - begin > 1 for step, begin in _begins(trace).items()):
        yield f"the {name}'s loss is the mean over the steps since the one logged before: so is what it is held against"
    unknown = [step for step, mean in means.items() if mean is None]
    if unknown:
        yield f"at step {min(unknown)} a mean loss needs steps that the {name} doesn't have, or not with a loss"


def _group_notes(name: str, trace: Trace, groups: int) -> Iterator[str]:
    if trace.header.foreign and groups > 1 and any(len(record.lr or ()) == 1 for record in trace.steps):
        yield f"the {name} has one LR: it is held against that of each of {groups} parameter groups"


def _term_notes(reference: Trace, candidate: Trace) -> Iterator[str]:
    if not _counts(reference) and reference.steps:
        yield NO_ROLLOUTS[_counts(candidate)]
