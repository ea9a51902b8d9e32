"""Two traces, step by step and field by field. Whatever isn't shown to be within its bound is a difference."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from ds_parity.parity.bounds import Bound, C, Tier, bits, eps, gap, has_nan, signed
from ds_parity.trace import StepRecord, Trace, Weights


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
)  # and each metric, which is How.LEFT_OUT

OPTIONAL = ("loss", "grad_norm", "loss_scale", "weights", "metrics")
_PACKING = ("passes", "idle_passes")
_HEADER = ("scenario", "config_hash", "seed", "ranks", "device", "versions")
_METRIC = "metrics."
_LOOSE = 0.1


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that isn't within its bound.

    Attributes:
        step: None for what holds for the whole trace.
        field: its name; `step` for steps that are missing, doubled or absent, `loss, mean` for a mean over steps.
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

    A quantity is None where one of the traces lacks it; it can be NaN and inf.
    """

    step: int
    candidate: StepRecord | None
    loss: float | None
    lr: float | None
    grad_norm: float | None
    weights: float | None
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing two traces found.

    Attributes:
        tier: what was asked.
        dtype: the type that the bounds are of.
        differences: those of the whole trace that forbid a comparison, then by step, then biases.
        rows: one per step of either trace.
        not_compared: fields that neither trace has, or that a rule leaves out.
        notes: what to know before the verdict: headers that differ, rules that leave fields out, bounds too wide to
            prove much.
    """

    tier: Tier
    dtype: str
    differences: tuple[Difference, ...]
    rows: tuple[Row, ...]
    not_compared: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every compared field of every step is within its bound."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference, None where there is none."""
        return self.differences[0] if self.differences else None


@dataclass(frozen=True, slots=True)
class _Pair:
    """What both traces say of one step; `terms` loss tokens were summed up to and including it."""

    step: int
    reference: StepRecord | None
    candidate: StepRecord | None
    terms: int

    def values(self, name: str) -> tuple[object, object]:
        return _value(self.reference, name), _value(self.candidate, name)


@dataclass(frozen=True, slots=True)
class _Ruler:
    """What bounds depend on. Losses can be near 0, so `floor` is the greatest of the reference: their scale."""

    tier: Tier
    eps: float
    floor: float
    left_out: frozenset[str]

    def bound(self, name: str, terms: float) -> Bound:
        return Bound(C[name], self.eps, terms)

    def gap(self, pair: _Pair, name: str) -> float | None:
        a, b = pair.values(name)
        return None if a is None or b is None else gap(a, b, self.scale(name))

    def scale(self, name: str) -> float:
        return self.floor if name == "loss" else 0.0


def compare(reference: Trace, candidate: Trace, tier: Tier, dtype: str = "fp32") -> Comparison:
    """Compare two traces.

    Always bit for bit: steps, passes, rollouts, prompts, tokens, total, lr, skipped. Passes are left out where the
    number of ranks differs or a side is `torch`, since the ranks decide them. The EXACT tier compares all else bit for
    bit too; the REASSOCIATED tier bounds loss, gradient norm and weights, and the mean signed difference of
    the first two.
    NaN, an absent field, a missing step and a trace without steps are differences, whatever the other trace has.

    Args:
        reference: the trace that is right.
        candidate: the trace in question.
        tier: how like they must be.
        dtype: `fp64`, `fp32`, `bf16` or `fp16`, what the run computes in; the REASSOCIATED tier's bounds depend on it.

    Raises:
        ConfigError: for another dtype.
    """
    left_out = _left_out(reference, candidate, tier)
    losses = (abs(record.loss) for record in reference.steps if record.loss is not None)
    ruler = _Ruler(tier, eps(dtype), max(filter(math.isfinite, losses), default=0.0), frozenset(left_out))
    pairs = tuple(_pairs(reference, candidate))
    rows = tuple(_row(pair, ruler) for pair in pairs)
    found = chain(_unfit(reference, candidate), *(row.differences for row in rows), _biases(pairs, ruler))
    absent = [name for name in OPTIONAL if not _present(reference, name) and not _present(candidate, name)]
    return Comparison(
        tier=tier,
        dtype=dtype,
        differences=tuple(found),
        rows=rows,
        not_compared=tuple(dict.fromkeys((*absent, *left_out))),
        notes=(
            *_header_notes(reference, candidate),
            *(why for name, why in left_out.items() if name not in absent),
            *_loose_bounds(pairs, ruler),
        ),
    )


def _value(record: StepRecord | None, name: str) -> object:
    if record is None:
        return None
    if name.startswith(_METRIC):
        return record.metrics.get(name.removeprefix(_METRIC))
    return getattr(record, name)


def _present(trace: Trace, name: str) -> bool:
    return any(_value(record, name) not in (None, {}) for record in trace.steps)


def _left_out(reference: Trace, candidate: Trace, tier: Tier) -> dict[str, str]:
    """Fields that a rule leaves out, with the rule."""
    out: dict[str, str] = {}
    a, b = reference.header, candidate.header
    if a.ranks != b.ranks or "torch" in (a.engine, b.engine):
        sides = f"{a.engine} on {a.ranks} and {b.engine} on {b.ranks}"
        out |= {name: f"{name} is not compared: the number of ranks decides it ({sides})" for name in _PACKING}
    if tier is not Tier.EXACT:
        names = [field.name for field in FIELDS if field.how is How.LEFT_OUT]
        out |= {name: f"{name} is compared in the exact tier only" for name in (*names, "metrics")}
    return out


def _pairs(reference: Trace, candidate: Trace) -> Iterator[_Pair]:
    a = {record.step: record for record in reference.steps}
    b = {record.step: record for record in candidate.steps}
    terms = 0
    for step in sorted(a.keys() | b.keys()):
        terms += a[step].tokens if step in a else 0
        yield _Pair(step, a.get(step), b.get(step), terms)


def _row(pair: _Pair, ruler: _Ruler) -> Row:
    return Row(
        step=pair.step,
        candidate=pair.candidate,
        loss=ruler.gap(pair, "loss"),
        lr=ruler.gap(pair, "lr"),
        grad_norm=ruler.gap(pair, "grad_norm"),
        weights=ruler.gap(pair, "weights"),
        differences=tuple(_step_differences(pair, ruler)),
    )


def _step_differences(pair: _Pair, ruler: _Ruler) -> Iterator[Difference]:
    step, a, b = pair.step, pair.reference, pair.candidate
    if a is None or b is None:
        why = f"step {step} is in the {'candidate' if a is None else 'reference'} only"
        yield Difference(step, "step", None if a is None else step, None if b is None else step, None, None, why)
        return
    metrics = sorted(a.metrics.keys() | b.metrics.keys()) if "metrics" not in ruler.left_out else ()
    for field in (*FIELDS, *(Field(_METRIC + name, How.LEFT_OUT) for name in metrics)):
        if field.name not in ruler.left_out:
            yield from _field_differences(field, pair, ruler)


def _field_differences(field: Field, pair: _Pair, ruler: _Ruler) -> Iterator[Difference]:
    name = field.name
    a, b = pair.values(name)
    if a is None and b is None:
        return
    apart = ruler.gap(pair, name)
    bounded = ruler.tier is not Tier.EXACT and field.how is How.BOUNDED
    bound = ruler.bound(name, pair.terms) if bounded else None
    why = _unlike(name, a, b, bounded)
    if why is None and bound is None and bits(a) != bits(b):
        why = f"{name} must be equal bit for bit"
    if why is None and bound is not None and (apart is None or not apart <= bound.relative):
        why = f"{name} is further off than adding in another order explains ({bound})"
    if why is not None:
        limit = bound.relative if bound else 0.0
        yield Difference(pair.step, name, _shown(a, bounded), _shown(b, bounded), apart, limit, why)


def _unlike(name: str, a: object, b: object, bounded: bool) -> str | None:
    """Why two values of a field can't be equal, whatever the bound."""
    if a is None or b is None:
        return f"{name} is in the {'candidate' if a is None else 'reference'} only"
    if has_nan(a) or has_nan(b):
        return f"{name} is NaN, which equals nothing, itself included"
    if bounded and isinstance(a, Weights) and isinstance(b, Weights) and len(a.sketch) != len(b.sketch):
        return f"{name} have sketches of {len(a.sketch)} and {len(b.sketch)} numbers, which can't be compared"
    return None


def _shown(value: object, bounded: bool) -> object:
    if isinstance(value, Weights):
        return value.norm if bounded else value.checksum
    return value


def _unfit(reference: Trace, candidate: Trace) -> Iterator[Difference]:
    """Steps that are absent altogether, or doubled."""
    for side, trace in (("reference", reference), ("candidate", candidate)):
        if not trace.steps:
            a, b = len(reference.steps), len(candidate.steps)
            yield Difference(None, "step", a, b, None, None, f"the {side} has no steps")
        for step, times in Counter(record.step for record in trace.steps).items():
            if times > 1:
                why = f"step {step} is in the {side} {times} times"
                yield Difference(step, "step", step, step, None, None, why)


def _biases(pairs: tuple[_Pair, ...], ruler: _Ruler) -> Iterator[Difference]:
    """Mean signed differences: what stays within its bound in every step, always on the same side."""
    if ruler.tier is Tier.EXACT:
        return
    for name in ("loss", "grad_norm"):
        known = list(_known(pairs, name))
        count = len(known)
        if count < 2:
            continue
        mean = sum(signed(x, y, ruler.scale(name)) for x, y, _ in known) / count
        a, b, terms = (sum(column) / count for column in zip(*known, strict=True))
        bound = ruler.bound(name, terms).mean(count)
        if not abs(mean) <= bound:
            why = f"{name} is off to one side over {count} steps: rounding averages out, a bias does not"
            yield Difference(None, f"{name}, mean", a, b, mean, bound, why)


def _known(pairs: tuple[_Pair, ...], name: str) -> Iterator[tuple[float, float, int]]:
    """Reference, candidate and terms of the steps in which both traces have a figure."""
    for pair in pairs:
        a, b = pair.values(name)
        if isinstance(a, float) and isinstance(b, float):
            yield a, b, pair.terms


def _header_notes(reference: Trace, candidate: Trace) -> Iterator[str]:
    for name in _HEADER:
        a, b = getattr(reference.header, name), getattr(candidate.header, name)
        if a != b:
            yield f"the headers differ in {name}: reference {a!r}, candidate {b!r}"


def _loose_bounds(pairs: tuple[_Pair, ...], ruler: _Ruler) -> Iterator[str]:
    """Bounds that many tokens and a short type have made so wide that staying within them says little."""
    if ruler.tier is Tier.EXACT or not pairs:
        return
    for name in C:
        bound = ruler.bound(name, pairs[-1].terms)
        if bound.relative > _LOOSE:
            yield f"the bound of {name} grows to {bound.relative:.3g} ({bound}): equal within it proves little"
