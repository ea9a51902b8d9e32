"""Two traces side by side, as the rules look at them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ds_parity.parity.comparison.fields import Comparison
from ds_parity.trace import StepRecord, Trace
from ds_parity.trace.records import METRIC


def near(value: float | None, other: float, relative: float = 0.02) -> bool:
    """Whether two numbers are alike; never for None, NaN or infinity."""
    return value is not None and abs(value - other) <= relative * abs(other)


def alike(values: list[float], relative: float = 0.03) -> bool:
    """Whether there are numbers, and all are near their median."""
    if not values:
        return False
    median = sorted(values)[len(values) // 2]
    return all(near(value, median, relative) for value in values)


@dataclass(frozen=True)
class View:
    """What a comparison found, ready to be asked.

    Attributes:
        reference: the trace that is right, or an excerpt of it.
        candidate: the trace in question, or the same steps of it.
        comparison: of the whole traces.
    """

    reference: Trace
    candidate: Trace
    comparison: Comparison

    @cached_property
    def pairs(self) -> list[tuple[StepRecord, StepRecord]]:
        """Steps that both have."""
        by_step = {record.step: record for record in self.candidate.steps}
        return [(record, by_step[record.step]) for record in self.reference.steps if record.step in by_step]

    @cached_property
    def ranks(self) -> int:
        """Data-parallel ranks; the torch reference runs on one whatever it stands for."""
        return max(self.reference.header.ranks or 1, self.candidate.header.ranks or 1)

    @cached_property
    def fields(self) -> set[str]:
        """Fields that differ in any step of the whole traces; metrics as one."""
        return {_plain(difference.name) for difference in self.comparison.found}

    @cached_property
    def first(self) -> int:
        """Index into `pairs` of the first step that differs; their number where none does."""
        steps = {d.step for d in self.comparison.differences if d.step is not None}
        return next((i for i, (a, _) in enumerate(self.pairs) if a.step in steps), len(self.pairs))

    def step(self, index: int) -> int:
        """The number of a step by its index into `pairs`: traces may begin anywhere, and excerpts do."""
        return self.pairs[index][0].step

    @cached_property
    def at_first(self) -> set[str]:
        """Fields that differ in the first step that does."""
        if self.first == len(self.pairs):
            return set()
        step = self.pairs[self.first][0].step
        return {_plain(d.field) for d in self.comparison.differences if d.step == step}

    @property
    def compared_after_the_first(self) -> list[str]:
        """Which of weights, gradient norm and loss both sides hold in every step after the first but skipped ones."""
        later = [pair for pair in self.pairs[1:] if not pair[0].skipped]
        names = ("weights", "grad_norm", "loss")
        in_every_step = {name: all(getattr(one, name) is not None for pair in later for one in pair) for name in names}
        return [name for name in names if later and in_every_step[name]]

    @property
    def same_windows(self) -> bool:
        """Whether every step holds the same rollouts in both."""
        return not self.fields & {"rollouts", "step"}

    @cached_property
    def totals(self) -> list[float]:
        """The reference's denominators; 0 where it has none."""
        return [a.total or 0.0 for a, _ in self.pairs]

    def ratios(self, name: str) -> list[float | None]:
        """Return candidate / reference, pair by pair; None where one is absent, not finite or 0."""
        return [_ratio(getattr(a, name), getattr(b, name)) for a, b in self.pairs]

    @cached_property
    def passes(self) -> list[int]:
        """Passes of each window, from the side that isn't the torch reference."""
        of_candidate = self.candidate.header.engine != "torch"
        return [(b if of_candidate else a).passes or 0 for a, b in self.pairs]

    @cached_property
    def idle(self) -> list[int]:
        """Idle passes of each window, from the same side."""
        of_candidate = self.candidate.header.engine != "torch"
        return [(b if of_candidate else a).idle_passes or 0 for a, b in self.pairs]


def _plain(field: str) -> str:
    return "metrics" if field.startswith(METRIC) else field.removesuffix(", mean")


def _ratio(reference: object, candidate: object) -> float | None:
    if not isinstance(reference, float) or not isinstance(candidate, float) or not reference:
        return None
    ratio = candidate / reference
    return ratio if math.isfinite(ratio) else None
