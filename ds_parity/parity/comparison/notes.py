"""What to know before a verdict: headers that differ, fields that are left out and why, bounds that prove little."""

import math
from collections.abc import Iterable, Iterator, Mapping

from ds_parity.parity.comparison.bounds import DRIFT, Tier
from ds_parity.parity.comparison.fields import BOUNDED, FIELDS, How, unrecorded
from ds_parity.parity.comparison.ruler import BINARY, Ruler
from ds_parity.parity.comparison.tally import LOOSE, Moved, Tally
from ds_parity.trace import Header, Precision, Trace
from ds_parity.trace.columns import TraceFile
from ds_parity.trace.records import METRIC

Rules = tuple[tuple[tuple[str, ...], str], ...]
_PACKING = ("passes", "idle_passes")
_HEADER = ("scenario", "config_hash", "seed", "ranks", "device", "versions")
_MOST = 3
_SAME_START = 1e-6  # weights in fp32 and the same in fp64 lie less apart


def rules(reference: Trace | TraceFile, candidate: Trace | TraceFile, tier: Tier) -> Rules:
    """Fields that a rule leaves out, with the rule; each field once."""
    return tuple(_rules(reference, candidate, tier))


def _rules(
    reference: Trace | TraceFile, candidate: Trace | TraceFile, tier: Tier
) -> Iterator[tuple[tuple[str, ...], str]]:
    a, b = reference.header, candidate.header
    left_out: set[str] = set()
    if tier is not Tier.EXACT:
        left_out |= {field.name for field in FIELDS if field.how is How.LEFT_OUT}
    for name, trace in (("reference", reference), ("candidate", candidate)):
        unknown = tuple(it for it in unrecorded(trace) if it not in left_out) if isinstance(trace, Trace) else ()
        if unknown:
            left_out |= set(unknown)
            yield (
                unknown,
                f"no value of {'it' if len(unknown) == 1 else 'them'} was read from the {name} ({trace.header.engine})",
            )
    packing = tuple(name for name in _PACKING if name not in left_out)
    apart = None not in (a.ranks, b.ranks) and a.ranks != b.ranks
    if packing and (apart or _has_torch(reference, candidate)):
        yield packing, f"the ranks decide them ({a.engine} on {a.ranks}, {b.engine} on {b.ranks})"
    if tier is not Tier.EXACT:
        names = (field.name for field in FIELDS if field.how is How.LEFT_OUT)
        yield tuple(names), "that is left to the exact tier"


def of_rules(rules: Rules, absent: Iterable[str]) -> Iterator[str]:
    """One note a rule, unless neither trace has what it leaves out."""
    absent = set(absent)
    for names, why in rules:
        known = [name for name in names if name not in absent]
        if known:
            yield f"{' and '.join(known)} {'is' if len(known) == 1 else 'are'} not compared: {why}"


def _has_torch(reference: Trace | TraceFile, candidate: Trace | TraceFile) -> bool:
    """Whether one side is `torch`, which is always one rank, and the other one is not."""
    return (reference.header.engine == "torch") is not (candidate.header.engine == "torch")


def of_headers(reference: Trace | TraceFile, candidate: Trace | TraceFile) -> Iterator[str]:
    """What the headers don't say alike."""
    for name in _HEADER:
        if name == "ranks" and _has_torch(reference, candidate):
            continue
        a, b = getattr(reference.header, name), getattr(candidate.header, name)
        if a != b and not ((a is None and reference.header.foreign) or (b is None and candidate.header.foreign)):
            yield f"the headers differ in {name}: reference {a!r}, candidate {b!r}"


def apart_at_start(reference: Header, candidate: Header) -> float | None:
    """Return how far two runs start from each other.

    Args:
        reference: the header of a trace.
        candidate: likewise.

    Returns:
        The distance of the weights before the first step, in units of the reference's norm (>= 0); None where a header
        doesn't tell, 0.0 where it is no more than rounding.
    """
    a, b = reference.start, candidate.start
    if a is None or b is None or not a.sketch or len(a.sketch) != len(b.sketch) or not a.norm > 0:
        return None
    apart = math.dist(a.sketch, b.sketch) / math.sqrt(len(a.sketch)) / a.norm
    return 0.0 if apart <= _SAME_START else apart


def of_starts(reference: Trace | TraceFile, candidate: Trace | TraceFile) -> Iterator[str]:
    """Runs that start from other weights."""
    if apart := apart_at_start(reference.header, candidate.header):
        they = f"they lie {apart:.2g} of the reference's norm apart before the first step"
        yield f"the runs start from other weights: {they}"


def of_reading(reference: Trace | TraceFile, candidate: Trace | TraceFile) -> Iterator[str]:
    """How columns of foreign traces were read."""
    for name, trace in (("reference", reference), ("candidate", candidate)):
        for note in trace.notes if isinstance(trace, Trace) else ():
            yield f"the {name} ({trace.header.engine}): {note}"


def of_digits(
    reference: Trace | TraceFile, candidate: Trace | TraceFile, ruler: Ruler, slack: Mapping[str, float]
) -> Iterator[str]:
    """What was written with few digits, and the most that this leaves open."""
    for side, trace in (("reference", reference), ("candidate", candidate)):
        for name, precision in _precision(trace).items():
            if name not in ruler.written or name in ruler.left_out:
                continue
            most = slack.get(name, 0.0)
            held = f"held to half a unit in the last place, up to {most:.2g} of the value"
            # Equal numbers that were rounded alike come out equal, and so there is next to nothing to allow.
            alike = not ruler.bounds(name) and most < BINARY
            yield f"the {side} wrote {name} with {precision}: {'held to be equal' if alike else held}"


def _precision(trace: Trace | TraceFile) -> Mapping[str, Precision]:
    return trace.precision if isinstance(trace, Trace) else {}


def of_silence(tally: Tally) -> Iterator[str]:
    """Losses and norms that are 0 in every step, which two runs that compute nothing have alike."""
    for name, silent in tally.silent.items():
        if silent:
            said = {"loss": "loss", "grad_norm": "gradient norm"}[name]
            yield f"every {said} is 0 in both traces: runs that compute none would be equal too, which proves little"


def of_bounds(ruler: Ruler, tally: Tally) -> Iterator[str]:
    """Bounds that are so wide that staying within them says little: wider than what training moved, or than a tenth."""
    for name, most in tally.slack.items():
        if most > LOOSE:
            yield f"{ruler.digits(name)} of {name} leave open up to {most:.2g} of it: equal within it proves little"
    for name in BOUNDED if ruler.tier is not Tier.EXACT else ():
        bound = ruler.bound(name, tally.terms)
        if name == "weights" and tally.signal is not None:
            yield from _of_weights(tally.signal, ruler)
        elif bound.relative > LOOSE:
            yield f"the bound of {name} grows to {bound.relative:.3g} ({bound}): equal within it proves little"


def of_small_metrics(ruler: Ruler, tally: Tally) -> Iterator[str]:
    """Metrics that are so small that their bound is more than a tenth of them: what lies within is not seen."""
    if ruler.tier is Tier.EXACT or not tally.steps:
        return
    small = []
    for name in sorted(name for name in ruler.floors if name.startswith(METRIC)):
        # The candidate's, too: one that is 0 in the reference alone may be anything within its bound.
        most = max(ruler.floors[name], tally.greatest.get(name, 0.0))
        may = ruler.bound(name, tally.terms).relative * ruler.scale(name)
        if most and may > LOOSE * most:
            small.append(f"{name.removeprefix(METRIC)} (at most {most:.2g}, by {may:.2g})")
    if small:
        more = f", and {len(small) - _MOST} more" if len(small) > _MOST else ""
        yield f"these metrics may differ by much of themselves within their bounds: {', '.join(small[:_MOST])}{more}"


def _of_weights(signal: Moved, ruler: Ruler) -> Iterator[str]:
    if signal.part > 1:
        return
    way = "compare two runs in fp32" if ruler.dtype in DRIFT else "compare more steps, or steps of a greater LR"
    moved = f"training moved the weights by {signal.distance:.2g} of their norm, and their bound is {signal.bound:.2g}"
    yield f"{moved}: weights that never moved would be equal too, which proves little; {way}"
