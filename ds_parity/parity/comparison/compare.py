"""Two traces, step by step and field by field. Whatever isn't shown to be within its bound is a difference."""

import gc
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from ds_parity.parity.comparison import notes
from ds_parity.parity.comparison.alignment import NO_ROLLOUTS, Aligned, align
from ds_parity.parity.comparison.blocks import Blocks, in_memory, streamed
from ds_parity.parity.comparison.bounds import LEAST_LOSS, LINEAR, Tier, eps, stored_rounding
from ds_parity.parity.comparison.fields import NAMES, Comparison, Difference, present, value_of
from ds_parity.parity.comparison.ruler import Ruler
from ds_parity.parity.comparison.tally import Tally
from ds_parity.trace import Trace
from ds_parity.trace.columns import TraceFile
from ds_parity.trace.records import METRIC

__all__ = ["Comparison", "Setting", "compare", "setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Two traces that are ready to be compared.

    Attributes:
        reference: the trace that is right.
        candidate: the trace in question.
        ruler: what they are measured with.
        blocks: their steps side by side, from the first on with every call.
        rules: fields that are left out, and why.
        notes: on how the steps were brought side by side.
    """

    reference: Trace | TraceFile
    candidate: Trace | TraceFile
    ruler: Ruler
    blocks: Blocks
    rules: notes.Rules
    notes: tuple[str, ...]


def compare(reference: Trace | TraceFile, candidate: Trace | TraceFile, tier: Tier, dtype: str = "fp32") -> Comparison:
    """Compare two traces.

    Always bit for bit: steps, passes, rollouts, prompts, tokens, total, lr, skipped. Passes are left out where the
    number of ranks differs or a side is `torch`, since the ranks decide them. The EXACT tier compares all else bit for
    bit too; the REASSOCIATED tier bounds loss, gradient norm, weights and metrics, and the mean signed difference of
    loss and gradient norm.
    NaN, an absent field, a missing step and a trace without steps are differences, whatever the other trace has.

    Of a foreign trace (`Header.records`), what its trainer does not record is left out, and steps that it does not log
    (`align`); what it records in some steps only is a difference. In the REASSOCIATED tier, numbers that it wrote with
    few digits are widened by half a unit in the last place, those that must be equal too. Each of these is noted. Where
    both rounded to the same places, what must be equal is equal still, and losses and norms differ in few steps only.
    Traces that have nothing in common are not equal.

    Memory does not grow with the steps of a `TraceFile`, which is read twice. It must not be foreign, nor may the other
    trace be in memory.

    Args:
        reference: the trace that is right.
        candidate: the trace in question.
        tier: how like they must be.
        dtype: `fp64`, `fp32`, `bf16` or `fp16`, what the run computes in; the REASSOCIATED tier's bounds depend on it.

    Raises:
        ConfigError: for another dtype.
        TraceError: a file can't be read.
    """
    with _uncollected():
        made = setting(reference, candidate, tier, dtype)
        tally = Tally(made.ruler).take(made.blocks())
    rows, hidden = tally.rows()
    unfit, biases = tuple(_unfit(reference, candidate, tally)), tuple(tally.biases())
    nothing = () if unfit or biases or tally.differences or tally.shared else (_NOTHING,)
    absent = [name for name in NAMES if not _present(reference, candidate, name, tally)]
    little = (*notes.of_bounds(made.ruler, tally), *notes.of_silence(tally)) if tally.steps else ()
    unread = chain.from_iterable(names for names, _ in made.rules)
    return Comparison(
        tier=tier,
        dtype=dtype,
        differences=(*unfit, *tally.differences, *biases, *nothing),
        found=tally.found(unfit, (*biases, *nothing)),
        steps=tally.steps,
        rows=rows,
        hidden=hidden,
        held=tally.held,
        measured=tally.measured,
        not_compared=tuple(dict.fromkeys((*absent, *unread))),
        notes=(
            *notes.of_headers(reference, candidate),
            *notes.of_starts(reference, candidate),
            *notes.of_reading(reference, candidate),
            *made.notes,
            *notes.of_rules(made.rules, absent),
            *notes.of_digits(reference, candidate, made.ruler, tally.slack),
            *notes.of_small_metrics(made.ruler, tally),
            *little,
        ),
        proves_little=little,
        rounded=tally.rounded,
    )


_NOTHING = Difference(
    None, "step", None, None, None, None, "the traces share no field of any step, so nothing was compared"
)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from going through what is read again and again: it has no cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def setting(reference: Trace | TraceFile, candidate: Trace | TraceFile, tier: Tier, dtype: str = "fp32") -> Setting:
    """Make two traces ready to be compared. A file is read once for it, for the scale of its losses and norms."""
    rules = notes.rules(reference, candidate, tier)
    left_out = frozenset(chain.from_iterable(names for names, _ in rules))
    of_weights = _of_weights(reference, candidate, dtype)
    if isinstance(reference, TraceFile) and isinstance(candidate, TraceFile):
        floors, rollouts = _survey(reference)
        ruler = Ruler(tier, dtype, eps(dtype), floors, left_out, {}, *of_weights)
        other = not rollouts and _survey(candidate)[1]
        counting = "reference" if rollouts else "candidate" if other else None
        said = () if rollouts or not floors else (NO_ROLLOUTS[other],)
        blocks = partial(streamed, reference, candidate, counting, _usual_norm(ruler))
        return Setting(reference, candidate, ruler, blocks, rules, said)
    assert isinstance(reference, Trace)
    assert isinstance(candidate, Trace)
    aligned = align(reference, candidate)
    ruler = _ruler(aligned, tier, dtype, left_out, of_weights)
    return Setting(reference, candidate, ruler, lambda: in_memory(aligned, _usual_norm(ruler)), rules, aligned.notes)


def _usual_norm(ruler: Ruler) -> float | None:
    """What the way of the weights is worked out with, which the EXACT tier does not ask for."""
    return None if ruler.tier is Tier.EXACT else ruler.floors.get("grad_norm", 0.0)


def _of_weights(reference: Trace | TraceFile, candidate: Trace | TraceFile, dtype: str) -> tuple[float, bool]:
    """The ruler's `stored` and `turning`."""
    optimizer = reference.header.optimizer
    turning = optimizer is None or optimizer.lower() not in LINEAR
    return stored_rounding(reference.header, candidate.header, dtype), turning


def _survey(trace: TraceFile) -> tuple[dict[str, float], bool]:
    """The scales of a trace, none without steps; and whether it counts rollouts."""
    floors: dict[str, float] = {}
    norms = array("d")
    counts = False
    for fields in trace.figures():
        counts = counts or any(count is not None for count in fields["rollouts"])
        floors["loss"] = max(floors.get("loss", LEAST_LOSS), _greatest(fields["loss"]))
        for name in set().union(*fields["metrics"]):
            values = [metrics.get(name) for metrics in fields["metrics"]]
            floors[METRIC + name] = max(floors.get(METRIC + name, 0.0), _greatest(values))
        norms.extend(norm for norm in fields["grad_norm"] if norm is not None)
    return {**floors, "grad_norm": _usual(norms)} if floors else floors, counts


def _greatest(values: Sequence[float | None]) -> float:
    """The greatest absolute value of those that are finite; 0 without any."""
    return max((abs(float(value)) for value in values if value is not None and math.isfinite(value)), default=0.0)


def _usual(norms: Sequence[float]) -> float:
    """The median of the norms that are finite; 0 without any."""
    known = np.asarray(norms, dtype=float)
    known = np.sort(known[np.isfinite(known)])
    if not known.size:
        return 0.0
    # Not numpy's median, which adds the two in the middle: beyond 9e307 their sum overflows.
    return float(known[(known.size - 1) // 2] / 2 + known[known.size // 2] / 2)


def _ruler(aligned: Aligned, tier: Tier, dtype: str, left_out: frozenset[str], of_weights: tuple[float, bool]) -> Ruler:
    a, b = aligned.reference, aligned.candidate
    names = {*a.precision, *b.precision} if tier is not Tier.EXACT else ()
    written = {name: (a.precision.get(name), b.precision.get(name)) for name in names}
    averaged = frozenset({"loss"} if aligned.averaged else ())
    return Ruler(tier, dtype, eps(dtype), _floors(a), left_out, written, *of_weights, averaged)


def _floors(reference: Trace) -> dict[str, float]:
    names = {METRIC + name for record in reference.steps for name in record.metrics} | {"loss"}
    floors = {}
    for name in names:
        values = (value_of(record, name) for record in reference.steps)
        floors[name] = _greatest([value for value in values if isinstance(value, float)])
    floors["loss"] = max(floors["loss"], LEAST_LOSS)
    floors["grad_norm"] = _usual([step.grad_norm for step in reference.steps if step.grad_norm is not None])
    return floors


def _present(reference: Trace | TraceFile, candidate: Trace | TraceFile, name: str, tally: Tally) -> bool:
    """Whether a trace has a field, be it in a step that is left out."""
    both = (reference, candidate)
    return name in tally.seen or any(present(trace, name) for trace in both if isinstance(trace, Trace))


def _unfit(reference: Trace | TraceFile, candidate: Trace | TraceFile, tally: Tally) -> Iterator[Difference]:
    """Steps that are absent altogether, or doubled; a file with a doubled one can't be read."""
    a, b = (
        len(trace.steps) if isinstance(trace, Trace) else totals.steps
        for trace, totals in zip((reference, candidate), tally.held, strict=True)
    )
    for side, trace, count in (("reference", reference, a), ("candidate", candidate, b)):
        if not count:
            yield Difference(None, "step", a, b, None, None, f"the {side} has no steps")
        steps = trace.steps if isinstance(trace, Trace) else ()
        for step, times in Counter(record.step for record in steps).items():
            if times > 1:
                why = f"step {step} is in the {side} {times} times"
                yield Difference(step, "step", step, step, None, None, why)
