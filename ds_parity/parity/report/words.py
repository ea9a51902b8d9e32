"""The verdict on a comparison in words for people who have not read the documentation."""

from __future__ import annotations

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.fields import Comparison, Difference
from ds_parity.parity.report.terminal import number
from ds_parity.trace.records import METRIC

REFERENCES = {
    "deepspeed": "DeepSpeed",
    "deepspeed-loop": "DeepSpeed in a hand-written loop",
    "torch": "PyTorch without DeepSpeed",
}
"""What the references of `ds-parity verify` are. A reference that is a file is called by its path."""

_FIELDS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "loss_scale": "loss scale",
    "passes": "number of passes",
    "idle_passes": "number of idle passes",
    "rollouts": "number of rollouts",
    "prompts": "number of prompts",
    "tokens": "number of tokens",
    "skipped": "list of skipped steps",
}


# What an optimizer step is judged by: a verdict says which of these it rests on.
_JUDGED = ("loss", "lr", "grad_norm", "weights")


def reference_named(against: str) -> str:
    """Return what a reference is called in a sentence."""
    return REFERENCES.get(against, against)


def verdict(comparison: Comparison, against: str) -> str:
    """Return the verdict without its subject: `equal to DeepSpeed, bit for bit, in 5 of 5 steps`.

    Args:
        comparison: what comparing found.
        against: name of the reference, or the path of its trace.
    """
    reference, steps = reference_named(against), comparison.steps
    first = comparison.first
    if first is None:
        closeness = "bit for bit" if comparison.tier is Tier.EXACT else "up to rounding"
        missing = [_FIELDS.get(name, name) for name in _JUDGED if name in comparison.not_compared]
        without = f"; not compared: {', '.join(missing)}" if missing else ""
        return f"equal to {reference}, {closeness}, in {of_steps(steps, steps)}{without}"
    if first.step is None and first.field == "step":
        return f"not comparable with {reference}: {first.why}"
    if first.step is None:
        return f"differs from {reference} over all {number(steps, 'step')} together, {_in(first)}"
    counted = of_steps(differing_steps(comparison), steps)
    return f"differs from {reference} in {counted}, first at step {first.step}{_in(first, ', ')}"


def of_steps(some: int, every: int) -> str:
    """Return `3 of 5 steps`."""
    return f"{some} of {number(every, 'step')}"


def differing_steps(comparison: Comparison) -> int:
    """Return how many steps have a difference, those that no table shows included."""
    return sum(bool(row.differences) for row in comparison.rows) + sum(one.differing for one in comparison.hidden)


def _in(difference: Difference, comma: str = "") -> str:
    """Return in which figure two runs differ, in words; `comma` stands before it, where it is no clause of its own."""
    name = difference.field
    if name == "step":
        return f": {difference.why}"
    if name.startswith(METRIC):
        return f"{comma}in the metric {name.removeprefix(METRIC)}"
    field, _, mean = name.partition(", ")
    return f"{comma}in the {f'{mean} ' if mean else ''}{_FIELDS.get(field, field)}"
