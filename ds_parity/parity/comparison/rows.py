"""One step of two traces: how far each field lies apart, and which of them may not."""

from collections.abc import Iterator

from ds_parity.parity.comparison.bounds import bits, plainly_equal
from ds_parity.parity.comparison.fields import FIELDS, Difference, Field, How, Row, shown, unlike
from ds_parity.parity.comparison.ruler import Pair, Ruler
from ds_parity.trace.records import METRIC


def row(pair: Pair, ruler: Ruler) -> Row:
    """One step, with its differences."""
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
            yield from field_differences(field, pair, ruler)


def field_differences(field: Field, pair: Pair, ruler: Ruler) -> Iterator[Difference]:
    """The difference of a field that both records are asked for, if it is one."""
    name = field.name
    a, b = pair.values(name)
    if (a is None and b is None) or plainly_equal(a, b):
        return
    apart = ruler.gap(pair, name)
    bounded = ruler.bounds(field)
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
