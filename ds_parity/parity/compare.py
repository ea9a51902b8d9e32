"""Two traces, step by step and field by field. Whatever isn't shown to be within its bound is a difference."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from ds_parity.parity.bounds import LEAST_LOSS, Bound, C, Tier, bits, eps, gap, signed
from ds_parity.parity.fields import (
    BOUNDED,
    FIELDS,
    METRIC,
    OPTIONAL,
    Comparison,
    Difference,
    Field,
    How,
    Measured,
    Row,
    present,
    shown,
    unlike,
    value_of,
)
from ds_parity.trace import StepRecord, Trace

__all__ = ["Comparison", "compare"]

_PACKING = ("passes", "idle_passes")
_HEADER = ("scenario", "config_hash", "seed", "ranks", "device", "versions")
_LOOSE = 0.1


@dataclass(frozen=True, slots=True)
class _Pair:
    """What both traces say of one step; `terms` rollouts were summed up to and including it."""

    step: int
    reference: StepRecord | None
    candidate: StepRecord | None
    terms: int

    def values(self, name: str) -> tuple[object, object]:
        return value_of(self.reference, name), value_of(self.candidate, name)


@dataclass(frozen=True, slots=True)
class _Ruler:
    """What bounds depend on. Losses and metrics can be near 0, so `floors` are the greatest of the reference: their scale."""

    tier: Tier
    dtype: str
    eps: float
    floors: Mapping[str, float]
    left_out: frozenset[str]

    def bound(self, name: str, terms: float) -> Bound:
        # A metric is a weighted mean over the same rollouts as the loss.
        return Bound(C[self.dtype]["loss" if name.startswith(METRIC) else name], self.eps, terms)

    def gap(self, pair: _Pair, name: str) -> float | None:
        a, b = pair.values(name)
        return None if a is None or b is None else gap(a, b, self.scale(name))

    def scale(self, name: str) -> float:
        return self.floors.get(name, 0.0)


def compare(reference: Trace, candidate: Trace, tier: Tier, dtype: str = "fp32") -> Comparison:
    """Compare two traces.

    Always bit for bit: steps, passes, rollouts, prompts, tokens, total, lr, skipped. Passes are left out where the
    number of ranks differs or a side is `torch`, since the ranks decide them. The EXACT tier compares all else bit for
    bit too; the REASSOCIATED tier bounds loss, gradient norm, weights and metrics, and the mean signed difference of the
    first two.
    NaN, an absent field, a missing step and a trace without steps are differences, whatever the other trace has.

    Args:
        reference: the trace that is right.
        candidate: the trace in question.
        tier: how like they must be.
        dtype: `fp64`, `fp32`, `bf16` or `fp16`, what the run computes in; the REASSOCIATED tier's bounds depend on it.

    Raises:
        ConfigError: for another dtype.
    """
    rules = tuple(_rules(reference, candidate, tier))
    left_out = tuple(chain.from_iterable(names for names, _ in rules))
    ruler = _Ruler(tier, dtype, eps(dtype), _floors(reference), frozenset(left_out))
    pairs = tuple(_pairs(reference, candidate))
    rows = tuple(_row(pair, ruler) for pair in pairs)
    found = chain(_unfit(reference, candidate), *(row.differences for row in rows), _biases(pairs, ruler))
    absent = [name for name in OPTIONAL if not present(reference, name) and not present(candidate, name)]
    return Comparison(
        tier=tier,
        dtype=dtype,
        differences=tuple(found),
        rows=rows,
        measured=tuple(_measured(pairs, ruler)),
        not_compared=tuple(dict.fromkeys((*absent, *left_out))),
        notes=(
            *_header_notes(reference, candidate),
            *_rule_notes(rules, absent),
            *_loose_bounds(pairs, ruler),
        ),
    )


def _floors(reference: Trace) -> dict[str, float]:
    names = {METRIC + name for record in reference.steps for name in record.metrics} | {"loss"}
    found = {}
    for name in names:
        values = (value_of(record, name) for record in reference.steps)
        known = (abs(value) for value in values if isinstance(value, float) and math.isfinite(value))
        found[name] = max(known, default=0.0)
    found["loss"] = max(found["loss"], LEAST_LOSS)
    return found


def _rules(reference: Trace, candidate: Trace, tier: Tier) -> Iterator[tuple[tuple[str, ...], str]]:
    """Fields that a rule leaves out, with the rule."""
    a, b = reference.header, candidate.header
    if a.ranks != b.ranks or _has_torch(reference, candidate):
        yield _PACKING, f"the ranks decide them ({a.engine} on {a.ranks}, {b.engine} on {b.ranks})"
    if tier is not Tier.EXACT:
        names = (field.name for field in FIELDS if field.how is How.LEFT_OUT)
        yield tuple(names), "that is left to the exact tier"


def _rule_notes(rules: Iterable[tuple[tuple[str, ...], str]], absent: list[str]) -> Iterator[str]:
    """One note a rule, unless neither trace has what it leaves out."""
    for names, why in rules:
        known = [name for name in names if name not in absent]
        if known:
            yield f"{' and '.join(known)} {'is' if len(known) == 1 else 'are'} not compared: {why}"


def _has_torch(reference: Trace, candidate: Trace) -> bool:
    """Whether a side is `torch`, which is always one rank."""
    return "torch" in (reference.header.engine, candidate.header.engine)


def _pairs(reference: Trace, candidate: Trace) -> Iterator[_Pair]:
    a = {record.step: record for record in reference.steps}
    b = {record.step: record for record in candidate.steps}
    terms = 0
    for step in sorted(a.keys() | b.keys()):
        terms += a[step].rollouts if step in a else 0
        yield _Pair(step, a.get(step), b.get(step), terms)


def _row(pair: _Pair, ruler: _Ruler) -> Row:
    return Row(
        step=pair.step,
        candidate=pair.candidate,
        terms=pair.terms,
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
    for field in (*FIELDS, *(Field(METRIC + name, How.BOUNDED) for name in metrics)):
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
    why = unlike(name, a, b, bounded)
    if why is None and bound is None and bits(a) != bits(b):
        why = f"{name} must be equal bit for bit"
    if why is None and bound is not None and (apart is None or not apart <= bound.relative):
        why = f"{name} is further off than adding in another order explains ({bound})"
    if why is not None:
        limit = bound.relative if bound else 0.0
        yield Difference(pair.step, name, shown(a, bounded), shown(b, bounded), apart, limit, why)


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


def _measured(pairs: tuple[_Pair, ...], ruler: _Ruler) -> Iterator[Measured]:
    """Each bounded field where its difference is the greatest part of its bound; NaN is greater than all."""
    if ruler.tier is Tier.EXACT:
        return
    for name in BOUNDED:
        gaps = ((pair, ruler.gap(pair, name)) for pair in pairs)
        known = [Measured(name, p.step, x, ruler.bound(name, p.terms).relative) for p, x in gaps if x is not None]
        if known:
            yield max(known, key=lambda it: math.inf if math.isnan(it.difference) else it.difference / it.bound)


def _known(pairs: tuple[_Pair, ...], name: str) -> Iterator[tuple[float, float, int]]:
    """Reference, candidate and terms of the steps in which both traces have a figure."""
    for pair in pairs:
        a, b = pair.values(name)
        if isinstance(a, float) and isinstance(b, float):
            yield a, b, pair.terms


def _header_notes(reference: Trace, candidate: Trace) -> Iterator[str]:
    for name in _HEADER:
        if name == "ranks" and _has_torch(reference, candidate):
            continue
        a, b = getattr(reference.header, name), getattr(candidate.header, name)
        if a != b:
            yield f"the headers differ in {name}: reference {a!r}, candidate {b!r}"


def _loose_bounds(pairs: tuple[_Pair, ...], ruler: _Ruler) -> Iterator[str]:
    """Bounds that many rollouts and a short type have made so wide that staying within them says little."""
    if ruler.tier is Tier.EXACT or not pairs:
        return
    for name in BOUNDED:
        bound = ruler.bound(name, pairs[-1].terms)
        if bound.relative > _LOOSE:
            yield f"the bound of {name} grows to {bound.relative:.3g} ({bound}): equal within it proves little"
