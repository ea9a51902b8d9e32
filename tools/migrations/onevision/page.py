"""Tables of docs/migrations/onevision.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tools.migrations.formats import coefficients, diff, found, number, table


def probe() -> str:
    """The coefficients of the first two steps."""
    steps = found("onevision")["probed"]["before"]
    return "\n".join(f"Step {at}:\n\n{coefficients(step)}" for at, step in enumerate(steps, start=1))


def rates() -> str:
    """The learning rates that each window has seen, before, and that of the step after."""
    kept = found("onevision")["trained"]
    rows = []
    for at, old in enumerate(kept["before"]):
        new = kept["after"][at] if at < len(kept["after"]) else None
        shown = ", ".join(number(one) for one in old["rates"])
        cells = [str(at + 1), str(old["passes"]), shown, number(kept["half"][at]["lr"] if at < 8 else None)]
        rows.append([*cells, number(None if new is None else new["lr"])])
    header = ["step", "passes, before", "learning rates in its window, before", "half mended", "after"]
    return table(header, rows)


def seen() -> str:
    """What a user sees: losses and norms."""
    kept = found("onevision")["trained"]
    rows = []
    for name, said in (("before", "before"), ("half", "half mended"), ("merged", "merged"), ("after", "ds_parity")):
        steps = kept[name]
        shown = [", ".join(number(one[key], 3) for one in steps[:4]) for key in ("loss", "grad_norm")]
        rows.append([said, str(len(steps)), *shown, number(steps[-1]["lr"])])
    return table(["loop", "steps", "loss, steps 1 to 4", "gradient norm", "LR of the last step"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "onevision-probe": probe,
    "onevision-rates": rates,
    "onevision-seen": seen,
    "onevision-diff": partial(diff, "onevision"),
}
"""Tables by the name in their marks."""
