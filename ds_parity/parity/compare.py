"""Two traces, step by step and field by field. Whatever isn't shown to be within its bound is a difference."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from ds_parity.parity.alignment import Aligned, align
from ds_parity.parity.bounds import LEAST_LOSS, Tier, bits, eps, plainly_equal, signed
from ds_parity.parity.fields import (
    BOUNDED,
    FIELDS,
    METRIC,
    NAMES,
    Comparison,
    Difference,
    Field,
    How,
    Measured,
    Row,
    present,
    shown,
    unlike,
    unrecorded,
    value_of,
)
from ds_parity.parity.ruler import Pair, Ruler
from ds_parity.trace import Trace

__all__ = ["Comparison", "compare"]

_PACKING = ("passes", "idle_passes")
_HEADER = ("scenario", "config_hash", "seed", "ranks", "device", "versions")
_LOOSE = 0.1


def compare(reference: Trace, candidate: Trace, tier: Tier, dtype: str = "fp32") -> Comparison:
    """Compare two traces.

    Always bit for bit: steps, passes, rollouts, prompts, tokens, total, lr, skipped. Passes are left out where the
    number of ranks differs or a side is `torch`, since the ranks decide them. The EXACT tier compares all else bit for
    bit too; the REASSOCIATED tier bounds loss, gradient norm, weights and metrics, and the mean signed difference of the
    first two.
    NaN, an absent field, a missing step and a trace without steps are differences, whatever the other trace has.

    Of a foreign trace (`Header.records`), what its trainer does not record is left out, and steps that it does not log
    (`align`); what it records in some steps only is a difference. In the REASSOCIATED tier, numbers that it wrote with
    few digits are widened by half a unit in the last place, those that must be equal too. Each of these is noted.
    Traces that have nothing in common are not equal.

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
    aligned = align(reference, candidate)
    ruler = _ruler(aligned, tier, dtype, frozenset(left_out))
    pairs = tuple(_pairs(aligned))
    rows = tuple(_row(pair, ruler) for pair in pairs)
    found = (*_unfit(reference, candidate), *chain(*(row.differences for row in rows)), *_biases(pairs, ruler))
    absent = [name for name in NAMES if not present(reference, name) and not present(candidate, name)]
    return Comparison(
        tier=tier,
        dtype=dtype,
        differences=found or tuple(_nothing(pairs, ruler)),
        rows=rows,
        measured=tuple(_measured(pairs, ruler)),
        not_compared=tuple(dict.fromkeys((*absent, *left_out))),
        notes=(
            *_header_notes(reference, candidate),
            *_foreign_notes(reference, candidate),
            *aligned.notes,
            *_rule_notes(rules, absent),
            *_written_notes(aligned, pairs, ruler),
            *_loose_bounds(pairs, ruler),
        ),
    )


def _ruler(aligned: Aligned, tier: Tier, dtype: str, left_out: frozenset[str]) -> Ruler:
    a, b = aligned.reference, aligned.candidate
    names = {*a.precision, *b.precision} if tier is not Tier.EXACT else ()
    written = {name: (a.precision.get(name), b.precision.get(name)) for name in names}
    return Ruler(tier, dtype, eps(dtype), _floors(a), left_out, written)


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
    """Fields that a rule leaves out, with the rule; each field once."""
    a, b = reference.header, candidate.header
    left_out: set[str] = set()
    if tier is not Tier.EXACT:
        left_out |= {field.name for field in FIELDS if field.how is How.LEFT_OUT}
    for name, trace in (("reference", reference), ("candidate", candidate)):
        unknown = tuple(it for it in unrecorded(trace) if it not in left_out)
        if unknown:
            left_out |= set(unknown)
            yield (
                unknown,
                f"no record of the {name} ({trace.header.engine}) has {'it' if len(unknown) == 1 else 'them'}",
            )
    packing = tuple(name for name in _PACKING if name not in left_out)
    apart = None not in (a.ranks, b.ranks) and a.ranks != b.ranks
    if packing and (apart or _has_torch(reference, candidate)):
        yield packing, f"the ranks decide them ({a.engine} on {a.ranks}, {b.engine} on {b.ranks})"
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


def _pairs(aligned: Aligned) -> Iterator[Pair]:
    a = {record.step: record for record in aligned.reference.steps}
    b = {record.step: record for record in aligned.candidate.steps}
    for step in sorted(a.keys() | b.keys()):
        yield Pair(step, a.get(step), b.get(step), aligned.terms[step])


def _row(pair: Pair, ruler: Ruler) -> Row:
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


def _step_differences(pair: Pair, ruler: Ruler) -> Iterator[Difference]:
    step, a, b = pair.step, pair.reference, pair.candidate
    if a is None or b is None:
        why = f"step {step} is in the {'candidate' if a is None else 'reference'} only"
        yield Difference(step, "step", None if a is None else step, None if b is None else step, None, None, why)
        return
    metrics = sorted(a.metrics.keys() | b.metrics.keys()) if "metrics" not in ruler.left_out else ()
    for field in (*FIELDS, *(Field(METRIC + name, How.BOUNDED) for name in metrics)):
        if field.name not in ruler.left_out:
            yield from _field_differences(field, pair, ruler)


def _field_differences(field: Field, pair: Pair, ruler: Ruler) -> Iterator[Difference]:
    name = field.name
    a, b = pair.values(name)
    if (a is None and b is None) or plainly_equal(a, b):
        return
    apart = ruler.gap(pair, name)
    bounded = ruler.tier is not Tier.EXACT and field.how is How.BOUNDED
    bound = ruler.bound(name, pair.terms) if bounded else None
    why = unlike(name, a, b, bounded)
    if why is None and bound is None and bits(a) != bits(b) and not ruler.excused(pair, name):
        why = f"{name} must be equal bit for bit"
        why = f"{name} is further off than {written} leave open" if (written := ruler.digits(name)) else why
    within = bound is not None and (apart is not None and apart <= bound.relative)
    if why is None and bound is not None and not within and not ruler.excused(pair, name, bound.relative):
        why = f"{name} is further off than adding in another order explains ({bound})"
        why = f"{why}, and {written} leave open" if (written := ruler.digits(name)) else why
    if why is not None:
        limit = (bound.relative if bound else 0.0) + ruler.slack(pair, name)
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


def _nothing(pairs: tuple[Pair, ...], ruler: Ruler) -> Iterator[Difference]:
    """What no difference was found in because there was nothing to look at."""
    names = [name for name in NAMES if name not in ruler.left_out]
    if not any(None not in pair.values(name) for pair in pairs for name in names):
        why = "the traces share no field of any step, so nothing was compared"
        yield Difference(None, "step", None, None, None, None, why)


def _biases(pairs: tuple[Pair, ...], ruler: Ruler) -> Iterator[Difference]:
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
        # Rounding to few digits may err to one side for ever, as where a loss no longer moves: it doesn't average out.
        written = sum(ruler.slack(pair, name) for pair in pairs if None not in pair.values(name)) / count
        bound = ruler.bound(name, terms).mean(count) + written
        if not abs(mean) <= bound:
            why = f"{name} is off to one side over {count} steps: rounding averages out, a bias does not"
            yield Difference(None, f"{name}, mean", a, b, mean, bound, why)


def _measured(pairs: tuple[Pair, ...], ruler: Ruler) -> Iterator[Measured]:
    """Each bounded field where its difference is the greatest part of its bound; NaN is greater than all."""
    if ruler.tier is Tier.EXACT:
        return
    for name in BOUNDED:
        gaps = ((pair, ruler.gap(pair, name)) for pair in pairs)
        known = [Measured(name, p.step, x, ruler.limit(p, name)) for p, x in gaps if x is not None]
        if known:
            yield max(known, key=lambda it: math.inf if math.isnan(it.difference) else it.difference / it.bound)


def _known(pairs: tuple[Pair, ...], name: str) -> Iterator[tuple[float, float, int]]:
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
        if a != b and not ((a is None and reference.header.foreign) or (b is None and candidate.header.foreign)):
            yield f"the headers differ in {name}: reference {a!r}, candidate {b!r}"


def _foreign_notes(reference: Trace, candidate: Trace) -> Iterator[str]:
    for name, trace in (("reference", reference), ("candidate", candidate)):
        for note in trace.notes:
            yield f"the {name} ({trace.header.engine}): {note}"


def _written_notes(aligned: Aligned, pairs: tuple[Pair, ...], ruler: Ruler) -> Iterator[str]:
    for side, trace in (("reference", aligned.reference), ("candidate", aligned.candidate)):
        for name, precision in trace.precision.items():
            if name not in ruler.written or name in ruler.left_out:
                continue
            most = max((ruler.slack(pair, name) for pair in pairs), default=0.0)
            little = ": equal within it proves little" if most > _LOOSE else ""
            yield (
                f"the {side} wrote {name} with {precision}: held to half a unit in the last place, up to {most:.2g} of the "
                f"value{little}"
            )


def _loose_bounds(pairs: tuple[Pair, ...], ruler: Ruler) -> Iterator[str]:
    """Bounds that many rollouts and a short type have made so wide that staying within them says little."""
    if ruler.tier is Tier.EXACT or not pairs:
        return
    for name in BOUNDED:
        bound = ruler.bound(name, pairs[-1].terms)
        if bound.relative > _LOOSE:
            yield f"the bound of {name} grows to {bound.relative:.3g} ({bound}): equal within it proves little"
