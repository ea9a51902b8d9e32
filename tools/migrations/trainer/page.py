"""Tables of docs/migrations/trainer.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tools.migrations.formats import coefficients, diff, entered, found, number, table, times, worst

KINDS = (
    ("own", "`average_tokens_across_devices=False`"),
    ("means", "a model without `num_items_in_batch`"),
    ("right", "as it is by default"),
)


def probe() -> str:
    """The coefficients of the first step where each rank divides by its own tokens."""
    return coefficients(found("trainer")["probed"]["own, before"][0])


def steps() -> str:
    """What entered each step: the sum of coefficients, and the worst of them beside what it should be."""
    probed = found("trainer")["probed"]
    rows = []
    for kind, said in KINDS:
        for when, name in (("before", "Trainer"), ("after", '`normalise="token"`')):
            one = probed[f"{kind}, {when}"]
            rows.append([said, name, ", ".join(times(entered(step)) for step in one), ", ".join(map(worst, one))])
    return table(["the Trainer", "loop", "entered, steps 1 to 4", "share / right, the furthest from 1"], rows)


def seen() -> str:
    """What a user sees: the logged losses, and gradient norms."""
    trained = found("trainer")["trained"]
    rows = []
    for kind, said in KINDS:
        for when, name in (("before", "Trainer"), ("after", '`normalise="token"`')):
            one = trained[f"{kind}, {when}"]
            shown = [", ".join(number(step[key]) for step in one) for key in ("logged", "loss", "grad_norm")]
            rows.append([said, name, *shown])
    return table(["the Trainer", "loop", "logged loss", "loss by tokens", "gradient norm"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "trainer-probe": probe,
    "trainer-steps": steps,
    "trainer-seen": seen,
    "trainer-diff": partial(diff, "trainer"),
}
"""Tables by the name in their marks."""
