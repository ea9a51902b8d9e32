"""Tables of docs/migrations/skyrl.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tools.migrations.formats import diff, found, number, table


def cut() -> str:
    """Mini-batches of batches with more and more turns, by each rule."""
    from ds_parity.parity.data.rollouts import line_turns
    from tools.migrations.common import rollouts
    from tools.migrations.skyrl import mini_batches

    prompts, mini, samples, ranks = 128, 32, 4, 8
    every, rows = rollouts(longest=2048), []
    size = prompts * samples
    for number_, start in enumerate(range(0, len(every) // size * size, size), start=1):
        sequences = list(line_turns(every[start : start + size]))
        whole, rest = divmod(len(sequences), mini * samples)
        parts = mini_batches.by_prompts(sequences, mini)
        added = sum(-len(part) % ranks for part in parts)
        cells = [f"{len(sequences):,}", f"{whole} and {rest} sequences over: refused" if rest else str(whole)]
        rows.append([str(number_), *cells, str(len(parts)), f"{min(map(len, parts))} to {max(map(len, parts))}"])
        rows[-1].append(str(added))
    whole, rest = divmod(3509, 640)
    rows.append(["#1483", "3,509", f"{whole} of 640, and {rest} over: refused", "-", "-", "-"])
    header = ["batch", "sequences", "steps by sequences (meant: 4)", "steps by prompts", "sequences of a step"]
    return table([*header, "added for 8 ranks"], rows)


def trained() -> str:
    """Steps and learning rates of all loops."""
    kept = found("skyrl")["trained"]
    rows = []
    names = (
        ("sequences", "by sequences, 2 batches"),
        ("after, two batches", "ds_parity, 2 batches"),
        ("prompts", "by prompts, 3 batches"),
        ("after", "ds_parity, 3 batches"),
    )
    for name, said in names:
        steps = kept[name]
        held = [one["rollouts"] for one in steps]
        idle = sum(one["lr"] == 0 for one in steps)
        cells = [
            f"{min(held)} to {max(held)}",
            str(sum(one["passes"] for one in steps)),
            number(steps[-1]["lr"]),
            str(idle),
        ]
        rows.append([said, str(len(steps)), *cells])
    header = ["loop", "steps", "trajectories of a step", "passes", "LR of the last step", "steps with an LR of 0"]
    return table(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    "skyrl-cut": cut,
    "skyrl-trained": trained,
    "skyrl-diff": partial(diff, "skyrl"),
}
"""Tables by the name in their marks."""
