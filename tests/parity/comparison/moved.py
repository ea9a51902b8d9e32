"""Pairs of traces of which the second is the first with its numbers moved: not at all, to the bound, or far beyond."""

import math
from dataclasses import replace

from hypothesis import strategies as st

from ds_parity.parity.comparison.bounds import EPS, Bound, C, Tier
from ds_parity.trace import Precision, Trace
from tests.parity.comparison.comparing import HEADER, record, weights

ODD = st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1e308, -1e308, math.inf, -math.inf, math.nan])
SELDOM = st.sampled_from([False] * 19 + [True])  # integers() would give its ends too often
PRECISIONS = st.builds(
    Precision, decimals=st.none() | st.integers(0, 6), significant=st.none() | st.integers(1, 7), single=st.booleans()
)
SETTINGS = st.tuples(st.sampled_from(list(Tier)), st.sampled_from(list(EPS)))


def ulps(value, count):
    for _ in range(abs(count)):
        value = math.nextafter(value, math.copysign(math.inf, count))
    return value


@st.composite
def moved(draw, value, bound):
    """A number, the same, or moved by a few ulps, to its bound or a few ulps beside it, or far away."""
    if value is None or draw(st.booleans()):
        return value
    if draw(SELDOM):
        return draw(ODD)
    by = draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.0, 1.0, -1.0, -1.0, 1.001, 20.0]))
    return ulps(value + by * bound, draw(st.integers(-4, 4)))


def bounds(step, dtype):
    """What differences may be at a step, where all rollouts are 4 and nothing is near 0 or infinite."""
    return {name: Bound(constant, EPS[dtype], 4 * step).relative for name, constant in C[dtype].items()}


@st.composite
def figures(draw):
    """What the reference says of a step."""
    wild = draw(SELDOM)
    some = ODD if wild else st.floats(0.25, 4.0)
    sketch = draw(st.sampled_from([(), (3.0, -4.0), (3.0, -4.0), tuple(1.0 / at for at in range(1, 17))]))
    return {
        "loss": draw(some | st.none()) if wild else draw(some),
        "grad_norm": draw(some | st.none()) if wild else draw(some),
        "total": draw(st.sampled_from([4.0, 4.0, math.nan, -0.0]) if wild else st.just(4.0)),
        "lr": draw(st.sampled_from([(1e-3,), (1e-3, 1e-4), (1e-3, 1e-4, 0.0), (), None])),
        "rollouts": draw(st.sampled_from([0, None])) if wild else 4,
        "weights": draw(st.sampled_from([None, *[weights(10.0, sketch)] * 4])),
        "metrics": {name: draw(some) for name in draw(st.sets(st.sampled_from("xy")))},
    }


@st.composite
def other(draw, given, step, dtype):
    """What the candidate says of the same step."""
    allowed = bounds(step, dtype)
    changed = dict(given)
    for name in ("loss", "grad_norm"):
        scale = abs(given[name] or 0.0)
        changed[name] = draw(moved(given[name], allowed[name] * (scale if math.isfinite(scale) else 1.0)))
    changed["total"] = draw(st.sampled_from([given["total"]] * 19 + [ulps(4.0, 1)]))
    changed["lr"] = draw(st.sampled_from([given["lr"]] * 19 + [None, (), (1e-3,), (1e-3, ulps(1e-4, 1))]))
    changed["metrics"] = {name: draw(moved(it, allowed["loss"] * 0.5)) for name, it in given["metrics"].items()}
    changed |= {"tokens": 101} if draw(SELDOM) else {}
    changed |= {"rollouts": None} if draw(SELDOM) else {}
    changed |= {"skipped": True} if draw(SELDOM) else {}
    changed["weights"] = draw(other_weights(given["weights"], allowed["weights"]))
    return changed


@st.composite
def other_weights(draw, given, bound):
    """Weights of another norm or direction; its sketch may be longer or shorter, and the checksum the same."""
    if given is None or draw(SELDOM):
        return draw(st.sampled_from([given, given, given, None, weights()]))
    sketch = list(given.sketch)
    if sketch:
        at = draw(st.integers(0, len(sketch) - 1))
        sketch[at] = draw(moved(sketch[at], bound * 10.0 * math.sqrt(len(sketch))))
    sketch = sketch[: draw(st.sampled_from([None] * 9 + [1, 0]))]
    return weights(draw(moved(given.norm, bound * 10.0)), tuple(sketch), draw(st.sampled_from("ab")))


@st.composite
def runs(draw, most=8):
    """Tier, type, and two traces as files of our own hold them; one may begin later, or end earlier, than the other."""
    tier, dtype = draw(SETTINGS)
    given = draw(st.lists(figures(), min_size=1, max_size=most))
    a = [record(step, **it) for step, it in enumerate(given, 1)]
    b = [record(step, **draw(other(it, step, dtype))) for step, it in enumerate(given, 1)]
    (skip, drop), side = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (2, 2)])), draw(st.booleans())
    cut, whole = tuple(b if side else a)[skip : most - drop], tuple(a if side else b)
    ranks = HEADER.model_copy(update={"ranks": draw(st.sampled_from([2, 2, 2, 4]))})
    return (tier, dtype), (Trace(HEADER, whole if side else cut), Trace(ranks, cut if side else whole))


@st.composite
def traces(draw):
    """Tier, type, and two traces in memory, which may lack steps anywhere, or be another trainer's."""
    settings, pair = draw(runs())
    return settings, tuple(draw(in_memory(trace)) for trace in pair)


@st.composite
def in_memory(draw, trace):
    kept = tuple(one for one in trace.steps if not draw(SELDOM))
    if draw(st.booleans()):
        return replace(trace, steps=kept)
    written = draw(st.dictionaries(st.sampled_from(["loss", "lr", "grad_norm", "total"]), PRECISIONS, min_size=1))
    header = trace.header.model_copy(update={"engine": "other", "ranks": None, "records": ("loss", "lr", "grad_norm")})
    return replace(trace, header=header, steps=tuple(_rounded(one, written) for one in kept), precision=written)


def _rounded(one, written):
    known = {name: it for name, it in written.items() if getattr(one, name) is not None}
    return one.model_copy(
        update={
            name: tuple(_round(it, value) for value in getattr(one, name))
            if name == "lr"
            else _round(it, getattr(one, name))
            for name, it in known.items()
        }
    )


def _round(precision, value):
    if not math.isfinite(value):
        return value
    if precision.decimals is not None:
        return round(value, precision.decimals)
    return float(f"{value:.{precision.significant}g}") if precision.significant is not None else value
