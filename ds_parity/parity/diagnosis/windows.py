"""Windows that hold other rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.view import View, near
from ds_parity.trace import Trace


def causes(view: View) -> Iterator[Cause]:
    """Yield what would cut windows as the candidate's are cut."""
    a, b = _rollouts(view.reference), _rollouts(view.candidate)
    if not (a and b and a[0] and b[0] and _mean(a) and _mean(b)):
        return
    yield from _end(a, b)
    yield from _start(view, a, b)
    yield from _length(view, a, b)
    yield from _counter(view, a, b)


def _rollouts(trace: Trace) -> list[int]:
    """Return the rollouts of every step; none where a trainer doesn't record them."""
    known = [record.rollouts for record in trace.steps if record.rollouts is not None]
    return known if len(known) == len(trace.steps) else []


def _end(a: list[int], b: list[int]) -> Iterator[Cause]:
    if b == a[:-1]:
        said = (
            f"all steps but the last are there; it holds {a[-1]} rollouts, the others {min(a[:-1], default=0)} or more"
        )
        yield Cause("partial-window-leak", 0.9, said)
        yield Cause("indivisible-batch", 0.6, said)


def _start(view: View, a: list[int], b: list[int]) -> Iterator[Cause]:
    passes = [record.passes or 0 for record in view.candidate.steps]
    one, other = view.comparison.held
    more = other.steps > one.steps and other.rollouts == one.rollouts
    if all(count == 1 for count in passes) and more and not _by_prompts(view, b):
        yield Cause(
            "step-per-pass", 0.95, f"{other.steps} steps of one pass each, where the reference takes {one.steps}"
        )
    elif passes[0] == 1 and b[0] < a[0] and all(near(x, y, 0.5) for x, y in zip(a[1:], b[1:], strict=False)):
        yield Cause(
            "boundary-off-by-one",
            0.9,
            f"step {view.step(0)} is one pass of {b[0]} rollouts, every step after it as long as the reference's "
            f"({a[1:3]})",
        )


def _by_prompts(view: View, b: list[int]) -> bool:
    # As many rollouts a step as the reference has prompts, which is the same number in each of its steps.
    prompts = {record.prompts or 0 for record in view.reference.steps[:-1]}
    return len(prompts) == 1 and bool(prompts - {0}) and near(_mean(b), min(prompts), 0.3)


def _length(view: View, a: list[int], b: list[int]) -> Iterator[Cause]:
    pace = _mean(a) / _mean(b)
    if _by_prompts(view, b) and pace > 1.5:
        prompts = view.reference.steps[0].prompts
        yield Cause(
            "sequences-as-prompts",
            0.9,
            f"{_mean(b):.1f} rollouts a step, near the reference's {prompts} prompts, "
            f"which have {_mean(a):.1f} rollouts",
        )
    elif pace > 1.3 and view.ranks == 1:
        yield Cause(
            "sp-double-count", 0.8, f"windows are {pace:.2g} times too short: micro-batches are counted so often"
        )
    elif pace > 1.3:
        yield Cause("sp-double-count", 0.5, f"windows are {pace:.2g} times too short")
    if near(b[0] / a[0], view.ranks, 0.2) and view.ranks > 1 and near(1 / pace, view.ranks, 0.35):
        yield Cause("local-count", 0.85, f"windows are {1 / pace:.2g} times too long on {view.ranks} ranks")
    one, other = (totals.rollouts or 0 for totals in view.comparison.held)
    fewer = other < one and b != a[: len(b)]
    if fewer and all(y <= x for x, y in zip(a[:2], b[:2], strict=False)) and 0.7 < pace < 1.4:
        yield Cause(
            "silent-truncation",
            0.8,
            f"{one - other} of {one} rollouts are missing, step {view.step(0)} holds {b[0]} of {a[0]}",
        )


def _counter(view: View, a: list[int], b: list[int]) -> Iterator[Cause]:
    passes = [record.passes or 0 for record in view.candidate.steps][:-1]
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    wholes = list(accumulate(b))[:-1]
    target = round(sum(a[:-1]) / max(1, len(a[:-1])))
    if len(b) < len(a) and b[0] > 1.5 * a[0]:
        passed = sum(b[0] > x for x in accumulate(a))
        said = f"step {view.step(0)} goes on for {b[0]} rollouts, past {passed} boundaries of the reference"
        yield Cause("equality-boundary", 0.7 if wholes and not near(b[0] / a[0], view.ranks, 0.2) else 0.4, said)
    if same and len(set(passes)) == 1 and len(passes) > 1:
        yield Cause("counter-drift", 0.8, f"every window has {passes[0]} passes, whatever they hold ({b[:4]} rollouts)")
    if same > 1 and same < min(len(a), len(b)) and b[same] != a[same]:
        yield Cause(
            "resume-resets-window",
            0.7,
            f"steps {view.step(0)} to {view.step(0) + same - 1} are alike, then windows are counted anew: "
            f"{b[same]} rollouts in place of {a[same]}, of about {target}",
        )


def _mean(values: list[int]) -> float:
    # The last window is often short.
    whole = values[:-1] or values
    return sum(whole) / len(whole)
