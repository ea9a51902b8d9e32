"""Two traces cut into blocks of steps that both have, or only one of them: what is compared in bulk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ds_parity.parity.comparison.alignment import Aligned
from ds_parity.parity.comparison.travel import Travel, Travelled
from ds_parity.trace.columns import SIZE, Columns, TraceFile
from ds_parity.trace.records import StepRecord


@dataclass(frozen=True)
class Block:
    """Some steps, ascending, of both traces or of one.

    Attributes:
        steps: their numbers, n of them.
        terms: rollouts summed up to and including each; n.
        reference: n steps, or None where the reference has none of these.
        candidate: the same.
        travelled: how far training has moved the reference's weights; n.
    """

    steps: Sequence[int]
    terms: Sequence[int]
    reference: Columns | None
    candidate: Columns | None
    travelled: Travelled

    def records(self, at: int) -> tuple[StepRecord | None, StepRecord | None]:
        """What the reference and the candidate say of one step, by its place; None for the trace that lacks it."""
        a = self.reference.record(at) if self.reference is not None else None
        b = self.candidate.record(at) if self.candidate is not None else None
        return a, b


def in_memory(aligned: Aligned, usual: float | None) -> Iterator[Block]:
    """Blocks of traces in memory; of a step that a trace has twice, the last. `usual` as of `streamed`."""
    a = {record.step: record for record in aligned.reference.steps}
    b = {record.step: record for record in aligned.candidate.steps}
    every = sorted(a.keys() | b.keys())
    travel = None if usual is None else Travel(aligned.reference.header.start, usual)
    for (in_a, in_b), group in groupby(every, key=lambda step: (step in a, step in b)):
        together = list(group)
        for start in range(0, len(together), SIZE):
            steps = together[start : start + SIZE]
            terms = [aligned.terms[step] for step in steps]
            x, y = _columns(a, steps) if in_a else None, _columns(b, steps) if in_b else None
            yield Block(steps, terms, x, y, _along(travel, x, len(steps)))


def streamed(
    reference: TraceFile, candidate: TraceFile, rollouts_of: str | None, usual: float | None
) -> Iterator[Block]:
    """Blocks of two files, which are read as the blocks are asked for.

    Args:
        reference: its steps follow one another, as every file's do.
        candidate: the same.
        rollouts_of: `reference` or `candidate`, whose rollouts count as terms; None: each step is one term.
        usual: the usual norm of the reference's gradients, with which the way of its weights is worked out; None: that
            stays unknown.
    """
    terms = 0
    travel = None if usual is None else Travel(reference.header.start, usual)
    for a, b in _together(reference.columns(), candidate.columns()):
        one = a if a is not None else b
        assert one is not None
        counting = {"reference": a, "candidate": b}.get(rollouts_of or "")
        counts: Sequence[int | None] = counting.fields["rollouts"] if counting is not None else [None] * len(one)
        summed = []
        for count in counts:
            terms += 1 if rollouts_of is None else count or 0
            summed.append(terms)
        yield Block(one.steps, summed, a, b, _along(travel, a, len(one)))


def _along(travel: Travel | None, reference: Columns | None, steps: int) -> Travelled:
    return Travelled.unknown(steps) if travel is None or reference is None else travel.along(reference)


def _columns(records: dict[int, StepRecord], steps: Sequence[int]) -> Columns:
    return Columns.of([records[step] for step in steps])


def _together(
    reference: Iterator[Columns], candidate: Iterator[Columns]
) -> Iterator[tuple[Columns | None, Columns | None]]:
    """Runs of the same steps; with None in place of a trace that doesn't have them."""
    a, b = next(reference, None), next(candidate, None)
    while a is not None or b is not None:
        if a is not None and b is not None and a.steps[0] == b.steps[0]:
            count = min(len(a), len(b))
            yield a.cut(0, count), b.cut(0, count)
            a, b = _rest(a, count, reference), _rest(b, count, candidate)
        elif a is not None and (b is None or a.steps[0] < b.steps[0]):
            count = len(a) if b is None else min(len(a), b.steps[0] - a.steps[0])
            yield a.cut(0, count), None
            a = _rest(a, count, reference)
        elif b is not None:
            count = len(b) if a is None else min(len(b), a.steps[0] - b.steps[0])
            yield None, b.cut(0, count)
            b = _rest(b, count, candidate)


def _rest(columns: Columns, start: int, others: Iterator[Columns]) -> Columns | None:
    return columns.cut(start, len(columns)) if start < len(columns) else next(others, None)


Blocks = Callable[[], Iterator[Block]]
