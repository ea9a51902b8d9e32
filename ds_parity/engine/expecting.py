"""What `expect` is given: the contents of a rank's next window, from which its totals follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_parity.errors import WindowError
from ds_parity.window import Counts, Weighting, Window
from ds_parity.window.counts import weight_of, whole


def promised(
    window: Window, weighting: Weighting, passes: Any, weight: Any, given: Mapping[str, Any]
) -> tuple[Window, frozenset[str]]:
    """Return what a rank says that its next window will contain, as a window, and the names of what it says.

    Args:
        window: the open window.
        weighting: of the window.
        passes: micro-batches that are not idle; None where it isn't said.
        weight: what they weigh together, or weights by the names of terms; None where it isn't said.
        given: rollouts, prompts and tokens, likewise.

    Raises:
        WindowError: passes of the window have run, a number is wrong, or one that weighs the loss is missing.
    """
    if window.passes:
        raise WindowError(
            f"expect() inside window {window.index}, of which {window.passes} passes have run: its losses were divided "
            "by then; call it after the step() that closes a window and before the next backward()"
        )
    numbers = {name: whole(name, number) for name, number in given.items() if number is not None}
    if passes is not None:
        numbers["active"] = whole("passes", passes)
    # One micro-batch that contains all of it weighs as much, but for passes, which it says by themselves.
    counts = Counts(numbers.get("rollouts", 0), numbers.get("prompts", 0), numbers.get("tokens", 0))
    by_name = dict(weight) if isinstance(weight, Mapping) else {}
    units = {term.name: term.unit for term in weighting.terms} if weighting.terms else {"": weighting.unit}
    for name, unit in units.items():
        needs = {"rollout": "rollouts", "token": "tokens", "pass": "active", "target": "rollouts"}.get(unit, "weight")
        told = name in by_name or (needs == "weight" and weight is not None) or needs in numbers
        if not told:
            of = f"the term {name!r}" if name else "the loss"
            missing = {"active": "passes"}.get(needs, needs)
            raise WindowError(
                f"expect() without {missing}=, by which {of} is weighed: the total that it is divided by follows from "
                f"it; pass {missing}="
            )
    own: tuple[float, ...] = ()
    if weighting.terms:
        passes_by_name = {n: numbers["active"] for n, unit in units.items() if unit == "pass" and n not in by_name}
        own = weighting.terms.weigh(counts, set(units), {**passes_by_name, **by_name}, several=True)
    elif weighting.unit == "weight":
        own = (weight_of(weight),)
    total = sum(own) if own else numbers["active"] if weighting.unit == "pass" else weighting.of(counts)
    said = frozenset(numbers) | ({"weights"} if own else set())
    window = replace(window, rollouts=counts.rollouts, prompts=counts.prompts, tokens=counts.tokens)
    return replace(window, micro_batches=numbers.get("active", 0), weight=total, weights=own), said
