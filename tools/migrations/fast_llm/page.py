"""Tables of docs/migrations/fast_llm.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tools.migrations.formats import diff, entered, found, number, table, times


def steps() -> str:
    """Steps of all bundled rollouts by both rules, by ranks."""
    from tools.migrations.common import rollouts
    from tools.migrations.fast_llm import documents

    most, target = 2048, 64
    every, rows = rollouts(longest=2048), []
    for ranks in (2, 4, 8, 16):
        counts = [sum(map(len, row)) for row in documents.rows(every, ranks, most)]
        whole = sum(counts) // target
        for name, rule in (("`docs_per_step`", documents.by_reset), ("`overshoot: carry`", documents.by_carry)):
            sizes = documents.cut(counts, list(rule(counts, target)))
            cells = [str(len(sizes)), str(whole), f"{sum(sizes) / len(sizes):.1f}", f"{min(sizes)} to {max(sizes)}"]
            rows.append([str(ranks), name, *cells])
    return table(["ranks", "rule", "steps", "documents // 64", "documents of a step", "from, to"], rows)


def trained() -> str:
    """What both loops come to on 2 ranks."""
    kept = found("fast_llm")["trained"]
    rows = []
    for when, said in (("before", "before"), ("same", "after, `reset`"), ("after", "after, `carry`")):
        one = kept[f"documents, {when}"]
        held = [step["rollouts"] for step in one]
        passes = str(sum(step["passes"] for step in one))
        rows.append([said, str(len(one)), f"{min(held)} to {max(held)}", str(sum(held)), passes])
        rows[-1].append(", ".join(number(step["grad_norm"]) for step in one[:3]))
    return table(["loop", "steps", "documents of a step", "documents trained on", "passes", "gradient norms"], rows)


def labels() -> str:
    """What entered steps whose loss is divided by labels."""
    probed = found("fast_llm")["probed"]
    rows = []
    for at, (old, new) in enumerate(zip(probed["labels, before"], probed["labels, after"], strict=True), start=1):
        norms = [number(one["grad_norm"]) for one in (old, new)]
        rows.append([str(at), str(old["passes"]), times(entered(old)), times(entered(new)), *norms])
    return table(["step", "passes", "entered, before", "entered, after", "gradient norm, before", "after"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "fast-llm-steps": steps,
    "fast-llm-trained": trained,
    "fast-llm-labels": labels,
    "fast-llm-diff": partial(diff, "fast_llm"),
}
"""Tables by the name in their marks."""
