"""The same windows with another learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.view import View, alike, near


def causes(view: View) -> Iterator[Cause]:
    """Yield what would move the scheduler so."""
    if "lr" not in view.at_first or "skipped" in view.at_first:
        return
    a = [x.lr[0] for x, _ in view.pairs if x.lr]
    b = [y.lr[0] for _, y in view.pairs if y.lr]
    if len(a) < len(view.pairs) or len(b) < len(view.pairs):
        return
    yield from _logged_off(view, a, b)
    if view.first == 0:
        yield from _from_the_start(view, a, b)
    else:
        yield from _later(view, a, b)


def _logged_off(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    # A scheduler that is really a step off trains otherwise, and what it trains shows it: weights at once, the norm
    # where it is written in full, a loss of four digits hardly.
    agree = view.compared_after_the_first
    if view.fields - {"lr"} or len(set(a)) < 3 or not agree:
        return
    rounded = view.reference.precision.keys() | view.candidate.precision.keys()
    likelihood = 0.98 if "weights" in agree else 0.92 if "grad_norm" in agree and "grad_norm" not in rounded else 0.6
    for logged, due, when in ((b[:-1], a[1:], "next"), (b[1:], a[:-1], "step before")):
        if all(near(y, x, 1e-6) for x, y in zip(due, logged, strict=True)):
            shown = f"({logged[0]:.4g}, {logged[1]:.4g}, ...)"
            said = f"the LR of each step is that of the {when} {shown}; {', '.join(agree)} agree"
            yield Cause("lr-reported-a-step-off", likelihood, said)


def _from_the_start(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    factors = [y / x for x, y in zip(a, b, strict=True) if x]
    if alike(factors, 1e-6) and len(factors) > 1:
        yield Cause("base-lr", 0.9, f"the LR is {factors[0]:.6g} times the reference's in every step")
        return
    moved = next((abs(y - x) for x, y in pairwise(a) if x != y), 0.0)
    steps = f", by about {abs(b[0] - a[0]) / moved:.1f} of its steps" if moved else ""
    yield Cause(
        "scheduler-per-pass",
        0.9,
        f"before step {view.step(0)} is taken the LR has moved{steps} "
        f"({a[0]:.4g} to {b[0]:.4g}){_windows(view.passes[0])}",
    )


def _later(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    first = view.first
    yield from _anew(view, a, b)
    if view.pairs[first - 1][0].skipped:
        yield Cause(
            "scheduler-on-skipped-step",
            0.95,
            f"step {view.step(first - 1)} was skipped, and from step {view.step(first)} on the LR is a step ahead",
        )
    moves_a = [y - x for x, y in pairwise(a)]
    moves_b = [y - x for x, y in pairwise(b)]
    rollouts = [pair[0].rollouts or 0 for pair in view.pairs][:-1]
    shares = [move / count for move, count in zip(moves_a, rollouts, strict=True) if move and count]
    if len(set(rollouts)) > 1 and alike(shares[1:], 1e-3) and alike([m for m in moves_b if m][:3], 0.05):
        yield Cause(
            "scheduler-per-dynamic-step",
            0.9,
            f"the reference's LR moves with the rollouts of each window ({rollouts}), the candidate's by whole steps",
        )
    still = sum(not y and bool(x) for x, y in zip(moves_a, moves_b, strict=True))
    whole = [m for m in moves_b if m]
    moved = [m for m in moves_a if m]
    if still and whole and moved and near(abs(whole[-1]), abs(moved[-1]), 0.5):
        yield Cause(
            "scheduler-per-outer-step",
            0.85,
            f"the LR stands still in {still} of {len(moves_a)} steps in which it should move",
        )
    paces = [x / y for x, y in zip(moves_a, moves_b, strict=True) if x and y]
    if alike(paces, 0.1) and paces[0] > 1.2:
        passes = max(view.passes)
        said = f"the LR moves {paces[0]:.3g} times too slowly{_windows(passes)}"
        yield Cause("scheduler-budget-in-passes", 0.9 if near(paces[0], passes, 0.1) else 0.6, said)
    elif alike(paces, 0.1) and 0 < paces[0] < 0.8:
        yield Cause("scheduler-per-pass", 0.7, f"the LR moves {1 / paces[0]:.3g} times too fast")


def _anew(view: View, a: list[float], b: list[float]) -> Iterator[Cause]:
    # Of three rates or more: a schedule that stands still, or moves once, begins anew wherever one looks.
    first = view.first
    after = b[first:]
    starts = [at for at in range(first) if after == a[at : at + len(after)]]
    if starts and len(set(after)) > 2:
        yield Cause(
            "resume-resets-schedule",
            0.97,
            f"from step {view.step(first)} on the LR goes as from step {view.step(starts[0])} on "
            f"({after[0]:.4g}, where {a[first]:.4g} was due)",
        )


def _windows(passes: int) -> str:
    # Traces of other trainers don't say.
    return f"; windows have {passes} passes" if passes else ""
