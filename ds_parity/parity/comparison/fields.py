"""What is compared and what comparing finds: the fields of a step, and the differences of two traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ds_parity.parity.comparison.bounds import EPS, Bound, C, Tier, greatest, has_nan
from ds_parity.trace import StepRecord, Trace, Weights
from ds_parity.trace.records import METRIC


class How(Enum):
    """How the REASSOCIATED tier compares a field. The EXACT tier compares every field bit for bit."""

    EXACT = "bit for bit"
    BOUNDED = "within its bound"
    LEFT_OUT = "not at all"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a step: its name, and how the REASSOCIATED tier compares it."""

    name: str
    how: How


FIELDS = (
    Field("passes", How.EXACT),
    Field("idle_passes", How.EXACT),
    Field("rollouts", How.EXACT),
    Field("prompts", How.EXACT),
    Field("tokens", How.EXACT),
    Field("total", How.EXACT),
    Field("lr", How.EXACT),
    Field("skipped", How.EXACT),
    Field("loss", How.BOUNDED),
    Field("grad_norm", How.BOUNDED),
    Field("loss_scale", How.LEFT_OUT),
    Field("weights", How.BOUNDED),
)  # and each metric, which is How.BOUNDED

NAMES = (*(field.name for field in FIELDS), "metrics")
BOUNDED = tuple(field.name for field in FIELDS if field.how is How.BOUNDED)


def value_of(record: StepRecord | None, name: str) -> object:
    """A field of a step, or a metric by its prefixed name; None where absent."""
    if record is None:
        return None
    if name.startswith(METRIC):
        return record.metrics.get(name.removeprefix(METRIC))
    return getattr(record, name)


def present(trace: Trace, name: str) -> bool:
    """Whether a step of the trace has the field."""
    return any(value_of(record, name) not in (None, {}) for record in trace.steps)


def unrecorded(trace: Trace) -> tuple[str, ...]:
    """The fields that a foreign trainer doesn't record at all; those that it does in some steps are not among them."""
    records = trace.header.records
    if records is None:
        return ()
    return tuple(name for name in NAMES if name not in records and not present(trace, name))


def unlike(name: str, a: object, b: object, bounded: bool) -> str | None:
    """Why two values of a field can't be equal, whatever the bound."""
    if a is None or b is None:
        return f"{name} is in the {'candidate' if a is None else 'reference'} only"
    if has_nan(a) or has_nan(b):
        return f"{name} is NaN, which equals nothing, itself included"
    if bounded and isinstance(a, Weights) and isinstance(b, Weights) and len(a.sketch) != len(b.sketch):
        return f"{name} have sketches of {len(a.sketch)} and {len(b.sketch)} numbers, which can't be compared"
    return None


def shown(value: object, bounded: bool) -> object:
    """What a difference shows of a value: of weights, what was compared."""
    if isinstance(value, Weights):
        return value.norm if bounded else value.checksum
    return value


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that isn't within its bound.

    Attributes:
        step: None for what holds for the whole trace.
        field: its name; `step` for steps that are missing, doubled or absent, `loss, mean` for a mean over steps, and
            `loss, rounded` for the share of steps in which numbers of few digits differ.
        reference: its value there, None where absent.
        candidate: the same.
        difference: relative for floats and weights, absolute for counts, None where there is nothing to subtract.
        bound: what the difference may be, None where no difference may be.
        why: the rule, in a sentence.
    """

    step: int | None
    field: str
    reference: object
    candidate: object
    difference: float | None
    bound: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Row:
    """One step, for the table: the candidate's record (None where missing), and how far four quantities lie apart.

    A quantity is None where one of the traces lacks it; it can be NaN and inf. `terms` is what bounds grow with: the
    reference's rollouts up to and including the step.
    """

    step: int
    candidate: StepRecord | None
    terms: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    weights: float | None
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A bounded field in the step in which it comes nearest to its bound, or furthest over it."""

    field: str
    step: int
    difference: float
    bound: float


@dataclass(frozen=True, slots=True)
class FieldFound:
    """What one field's differences come to.

    Attributes:
        name: of the field.
        count: how many there are.
        first: the first of them.
        furthest: how far apart two values are at most; None where there is nothing to subtract.
        of_one_side: in how many steps one side alone has a value.
        of_both: the first difference of two values; None where one side alone has one each time.
    """

    name: str
    count: int
    first: Difference
    furthest: float | None
    of_one_side: int = 0
    of_both: Difference | None = None

    @classmethod
    def of(cls, difference: Difference) -> FieldFound:
        """A single one, of no single step."""
        return cls(difference.field, 1, difference, difference.difference, 0, difference)

    def and_also(self, other: FieldFound) -> FieldFound:
        """Together with later ones."""
        known = [it.furthest for it in (self, other) if it.furthest is not None]
        return replace(
            self,
            count=self.count + other.count,
            furthest=greatest(known) if known else None,
            of_one_side=self.of_one_side + other.of_one_side,
            of_both=self.of_both or other.of_both,
        )

    @property
    def without_those_of_one_side(self) -> FieldFound | None:
        """The differences of two values; None where there are none."""
        if not self.of_one_side:
            return self
        if self.of_both is None:
            return None
        return replace(self, count=self.count - self.of_one_side, first=self.of_both, of_one_side=0)


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Rows between two that are shown: the steps of those two, how many lie between, and how many of these differ."""

    after: int
    before: int
    count: int
    differing: int


@dataclass(frozen=True, slots=True)
class TraceTotals:
    """What a trace holds in all: steps, and rollouts (None where a step doesn't tell)."""

    steps: int
    rollouts: int | None

    def and_also(self, rollouts: Sequence[int | None]) -> TraceTotals:
        """Together with more steps."""
        known = [count for count in rollouts if count is not None]
        counted = self.rollouts is not None and len(known) == len(rollouts)
        return TraceTotals(self.steps + len(rollouts), (self.rollouts or 0) + sum(known) if counted else None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing two traces found.

    Attributes:
        tier: what was asked.
        dtype: the type that the bounds are of.
        differences: those of the whole trace that forbid a comparison, then by step, then biases; of very many by step
            the first 1,000 or so.
        found: all differences by field, in the order in which they are met.
        steps: of either trace, in all.
        rows: one per step of either trace; of more than 1,000 steps the first, the last, and the first that differ with
            the step before them.
        hidden: what lies between these.
        held: what the reference and the candidate hold.
        measured: one per field that both traces have, and that the REASSOCIATED tier bounds or few digits leave open;
            none in the EXACT tier.
        not_compared: fields that neither trace has, or that a rule leaves out.
        notes: what to know before the verdict: headers that differ, rules that leave fields out, bounds too wide to
            prove much.
        proves_little: why equal traces would say little, in whole sentences; none where they say enough.
        rounded: some figure is not the same and yet within its bound.
    """

    tier: Tier
    dtype: str
    differences: tuple[Difference, ...]
    found: tuple[FieldFound, ...]
    steps: int
    rows: tuple[Row, ...]
    hidden: tuple[HiddenRows, ...]
    held: tuple[TraceTotals, TraceTotals]
    measured: tuple[Measured, ...]
    not_compared: tuple[str, ...]
    notes: tuple[str, ...]
    proves_little: tuple[str, ...] = ()
    rounded: bool = False

    @property
    def equal(self) -> bool:
        """Whether every compared field of every step is within its bound."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference, None where there is none."""
        return self.differences[0] if self.differences else None

    @property
    def count(self) -> int:
        """How many differences there are, those that are not kept included."""
        return sum(it.count for it in self.found)

    def bound(self, name: str, terms: float) -> float:
        """What a field may be off by where `terms` rollouts were summed up; 0: it must be equal bit for bit."""
        if self.tier is Tier.EXACT or name not in BOUNDED:
            return 0.0
        return Bound(C[self.dtype][name], EPS[self.dtype], terms).relative


def plain(field: str) -> str:
    """Return the field that a difference is of: metrics as one, what holds of all steps as its field."""
    return "metrics" if field.startswith(METRIC) else field.partition(", ")[0]
