"""One step as it is shown: how far its quantities lie apart, and why fields differ. `judge` decides which do."""

from collections.abc import Iterator

from ds_parity.parity.comparison.blocks import Block
from ds_parity.parity.comparison.fields import Difference, Row, shown, unlike, value_of
from ds_parity.parity.comparison.judge import Judged
from ds_parity.parity.comparison.ruler import BINARY, Ruler


def row(block: Block, judged: Judged, at: int, ruler: Ruler) -> Row:
    """Put the verdict on one step into words.

    Args:
        block: some steps.
        judged: the verdict on each of them, field by field.
        at: the step's place in the block.
        ruler: what the verdict was made with.
    """
    return Row(
        step=block.steps[at],
        candidate=block.records(at)[1],
        terms=block.terms[at],
        loss=_gap(judged, "loss", at),
        lr=_gap(judged, "lr", at),
        grad_norm=_gap(judged, "grad_norm", at),
        weights=_gap(judged, "weights", at),
        differences=tuple(_differences(block, judged, at, ruler)),
    )


def _gap(judged: Judged, name: str, at: int) -> float | None:
    apart = judged.get(name)
    return float(apart.gap[at]) if apart is not None and apart.known[at] else None


def _differences(block: Block, judged: Judged, at: int, ruler: Ruler) -> Iterator[Difference]:
    step, (a, b) = block.steps[at], block.records(at)
    for name in (name for name, apart in judged.items() if apart.differs[at]):
        if a is None or b is None:
            why = f"step {step} is in the {'candidate' if a is None else 'reference'} only"
            yield Difference(step, name, None if a is None else step, None if b is None else step, None, None, why)
            continue
        x, y, bounded = value_of(a, name), value_of(b, name), ruler.bounds(name)
        limit = float(judged[name].limit[at])
        why = unlike(name, x, y, bounded) or _rule(name, block.terms[at], ruler, limit, block.travelled.path[at])
        yield Difference(step, name, shown(x, bounded), shown(y, bounded), _gap(judged, name, at), limit, why)


def _rule(name: str, terms: int, ruler: Ruler, limit: float, path: float) -> str:
    """The rule that two values broke which could have been equal."""
    written = ruler.digits(name)
    if name == "weights" and ruler.bounds(name) and limit < ruler.bound(name, terms).relative:
        way = f"the way that they have come ({path:.2g} of their norm)"
        return f"{name} are further off than {ruler.dtype} explains of {way}"
    if ruler.bounds(name):
        why = f"{name} is further off than adding in another order explains ({ruler.bound(name, terms)})"
        return f"{why}, and {written} leave open" if written else why
    if written and limit < BINARY:
        return f"{name} must be equal, because both traces rounded it alike (to {written})"
    return f"{name} is further off than {written} leave open" if written else f"{name} must be equal bit for bit"
