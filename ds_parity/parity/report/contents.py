"""What a report is of: comparisons with their traces, what was left out, configurations, and the date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ds_parity.config import Change
from ds_parity.parity.comparison.compare import Comparison, Setting, setting
from ds_parity.parity.diagnosis import NOTHING, Diagnosis
from ds_parity.parity.report.terminal import number
from ds_parity.parity.report.words import of_steps, verdict
from ds_parity.trace import Trace
from ds_parity.trace.columns import TraceFile

if TYPE_CHECKING:
    from ds_parity.parity.verification.verify import LeftOut


UNKNOWN = "not recorded"
"""What another trainer did not say."""


@dataclass(frozen=True)
class Side:
    """A trace, in memory or to be read again, and where it lies."""

    trace: Trace | TraceFile
    path: str


@dataclass(frozen=True)
class Compared:
    """One comparison of two traces.

    Attributes:
        scenario: the name of what was run.
        against: what the reference is called.
        comparison: what comparing found.
        reference: the trace that is right.
        candidate: the trace in question.
        diagnosis: what is known of the difference.
    """

    scenario: str
    against: str
    comparison: Comparison
    reference: Side
    candidate: Side
    diagnosis: Diagnosis = NOTHING

    @property
    def title(self) -> str:
        """The scenario's name and the reference's."""
        return f"{self.scenario} against {self.against}"

    @property
    def verdict(self) -> str:
        """What was found, without its subject: `equal to DeepSpeed, bit for bit, in 5 of 5 steps`."""
        return verdict(self.comparison, self.against)

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last of either trace, which must have one."""
        compared = [self.comparison.rows[0].step, self.comparison.rows[-1].step]
        # Rows lack the steps that a foreign trace does not log. The other trace has them, and they are drawn.
        memory = [side.trace for side in (self.reference, self.candidate) if isinstance(side.trace, Trace)]
        steps = [*compared, *(record.step for trace in memory for record in trace.steps)]
        return min(steps), max(steps)

    def setting(self) -> Setting:
        """The traces, ready to be gone through again."""
        tier, dtype = self.comparison.tier, self.comparison.dtype
        return setting(self.reference.trace, self.candidate.trace, tier, dtype)


@dataclass(frozen=True)
class Configurations:
    """The configuration as it was given, as DeepSpeed gets it, and what was changed."""

    extended: Mapping[str, Any]
    rewritten: Mapping[str, Any]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Contents:
    """All that a report says.

    Attributes:
        compared: the comparisons.
        made: when; nothing else in a report changes where its traces don't.
        left_out: comparisons that could not be made.
        configurations: None where they aren't known: a trace holds no more than a hash.
        facts: name to value, shown with the provenance beside what the traces' headers say.
    """

    compared: tuple[Compared, ...]
    made: datetime
    left_out: tuple[LeftOut, ...] = ()
    configurations: Configurations | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether there was something to compare, and all of it was equal."""
        return bool(self.compared) and all(one.comparison.equal for one in self.compared)

    @property
    def failed(self) -> Compared | None:
        """The first comparison with a difference, None where there is none."""
        return next((one for one in self.compared if not one.comparison.equal), None)

    @property
    def verdict(self) -> str:
        """All comparisons in a sentence."""
        if not self.compared:
            return "FAIL: nothing was compared"
        of = number(len(self.left_out), "comparison")
        left_out = f"; {of} {'was' if len(self.left_out) == 1 else 'were'} left out" if self.left_out else ""
        return f"{'PASS' if self.equal else 'FAIL'}: {self._found}{left_out}"

    @property
    def failed_first(self) -> tuple[Compared, ...]:
        """The comparisons, those with a difference before those without."""
        return tuple(sorted(self.compared, key=lambda one: one.comparison.equal))

    @cached_property
    def provenance(self) -> dict[str, str]:
        """What the traces' headers say, each name once; answers that differ stand side by side."""
        said: dict[str, dict[str, None]] = {}
        for name, value in self._said():
            said.setdefault(name, {})[value] = None
        return {name: " / ".join(values) for name, values in said.items()}

    @property
    def _found(self) -> str:
        if len(self.compared) == 1:
            return self.compared[0].verdict
        counted = number(len(self.compared), "comparison")
        if self.failed is None:
            steps = sum(one.comparison.steps for one in self.compared)
            return f"equal to its references in {len(self.compared)} of {counted} and {of_steps(steps, steps)}"
        differ = sum(not one.comparison.equal for one in self.compared)
        if differ == 1:
            return f"1 of {counted} differs: {self.failed.scenario} {self.failed.verdict}"
        return f"{differ} of {counted} differ. The first of them, {self.failed.scenario}, {self.failed.verdict}"

    def _said(self) -> Iterator[tuple[str, str]]:
        for one in self.compared:
            for side in (one.candidate, one.reference):
                header = side.trace.header
                yield "scenario", header.scenario or UNKNOWN
                yield "device", header.device or UNKNOWN
                yield "ranks", str(header.ranks or UNKNOWN)
                yield "seed", "none" if header.seed is None else str(header.seed)
                yield from (header.versions or {}).items()
