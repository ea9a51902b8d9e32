"""Tables of docs/migrations/open_instruct_dpo.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tools.migrations.formats import coefficients, diff, entered, found, number, table, times, worst

LOOPS = (
    ("alike", "alike"),
    ("tokens", "by tokens"),
    ("gas", "by `gradient_accumulation_steps`"),
    ("after", "ds_parity"),
)


def probe() -> str:
    """The coefficients of the first step by tokens."""
    return coefficients(found("open_instruct_dpo")["probed"]["tokens"][0])


def shares() -> str:
    """What entered the steps by each rule: the sum of coefficients, and the worst of them beside what is right."""
    probed = found("open_instruct_dpo")["probed"]
    rows = [
        [said, ", ".join(times(entered(one)) for one in probed[name]), ", ".join(map(worst, probed[name]))]
        for name, said in LOOPS
    ]
    return table(
        ["micro-batches weigh", "entered, by step", "share of a micro-batch / right, the furthest from 1"], rows
    )


def accuracies() -> str:
    """The logged accuracy of each step."""
    probed = found("open_instruct_dpo")["probed"]
    rows = [[said, ", ".join(number(one["accuracy"], 3) for one in probed[name])] for name, said in LOOPS]
    return table(["loop", "accuracy of the first step, and of the others"], rows)


def seen() -> str:
    """What a user sees: losses and gradient norms."""
    trained = found("open_instruct_dpo")["trained"]
    rows = [
        [said, *(", ".join(number(one[key]) for one in trained[name][:3]) for key in ("loss", "grad_norm"))]
        for name, said in LOOPS
    ]
    return table(["loop", "loss, steps 1 to 3", "gradient norm"], rows)


def passes() -> str:
    """Passes of all bundled pairs: two pairs in each micro-batch, and by a plan whose micro-batches are no longer."""
    import ds_parity
    from tools.migrations.open_instruct_dpo.task import MICRO, pairs

    every, target = pairs(731, 2048)[:704], 64
    length = [max(len(answer.tokens) for answer in one.sequences) for one in every]
    two = [2 * MICRO * max(length[at : at + MICRO]) for at in range(0, len(every), MICRO)]
    rows = [["two pairs in each"], ["planned"]]
    for ranks in (2, 4, 8, 16):
        plan = ds_parity.plan(every, dp_world_size=ranks, target=target, max_tokens=max(two), layout="padded")
        rows[0].append(str(len(every) // MICRO // ranks))
        rows[1].append(str(plan.passes))
    return table(["micro-batches", "2 ranks", "4 ranks", "8 ranks", "16 ranks"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "open-instruct-dpo-probe": probe,
    "open-instruct-dpo-shares": shares,
    "open-instruct-dpo-accuracies": accuracies,
    "open-instruct-dpo-seen": seen,
    "open-instruct-dpo-passes": passes,
    "open-instruct-dpo-diff": partial(diff, "open_instruct_dpo"),
}
"""Tables by the name in their marks."""
