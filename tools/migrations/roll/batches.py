"""How ROLL cuts a batch of rollouts into micro-batches and optimizer steps (read in 8eb27cc2), in our words.

Rollouts are sorted by length and dealt to ranks in turn. A micro-batch takes so many of them that its rows, each padded
to the longest of it, are at most `most` tokens (roll/utils/dynamic_batching.py:13-65). A step takes
`gradient_accumulation_steps` micro-batches of a rank (roll/pipeline/base_worker.py:87-93), the last one what is left.
The schedule counts on steps of a fixed number of rollouts (roll/configs/base_config.py:748-765).
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_parity.planning import Rollout

Row = list[list[Rollout]]
"""One pass: the rollouts of each rank."""


def micro_batches(rollouts: Sequence[Rollout], ranks: int, most: int) -> list[Row]:
    """Return the passes of a batch; its rollouts are a multiple of the ranks."""
    by_length = sorted(rollouts, key=lambda one: len(one.tokens))
    rows: list[Row] = []
    longest = most + 1  # nothing fits into the micro-batch before the first
    for together in zip(*(by_length[rank::ranks] for rank in range(ranks)), strict=True):
        longest = max(longest, *(len(one.tokens) for one in together))
        if not rows or (len(rows[-1][0]) + 1) * longest > most:
            rows.append([[] for _ in range(ranks)])
            longest = max(len(one.tokens) for one in together)
        for share, one in zip(rows[-1], together, strict=True):
            share.append(one)
    return rows


def steps(rollouts: Sequence[Rollout], ranks: int, most: int, gas: int) -> list[list[Row]]:
    """Return the optimizer steps of a batch, each a list of passes."""
    rows = micro_batches(rollouts, ranks, most)
    return [rows[at : at + gas] for at in range(0, len(rows), gas)]


def rollouts_of(step: list[Row]) -> int:
    """Return how many rollouts a step has on all ranks."""
    return sum(len(share) for row in step for share in row)


def counted(rollouts: int, ranks: int, nominal: int, gas: int) -> int:
    """Return the steps that the schedule counts on: of `nominal` rollouts in each micro-batch."""
    return rollouts // (nominal * gas) // ranks
