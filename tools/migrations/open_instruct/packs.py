"""How open-instruct's grpo_fast cuts a batch of rollouts into optimizer steps (read in e6c3044a), in our words.

Rollouts are packed end to end in their order (open_instruct/rl_utils.py:227-310). Packs that do not divide by the ranks
are cut off, and each rank is given a block of the others (data_loader.py:1231-1244). A step takes as many packs of a
rank as the batch has divided by `num_mini_batches`, rounded; what is left behind the last whole step is dropped
(grpo_fast.py:601-608).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_parity.planning import Rollout

Pack = list[Rollout]


@dataclass(frozen=True)
class Cut:
    """What becomes of one batch of rollouts.

    Attributes:
        steps: step by step, pass by pass, the pack of each rank.
        dropped: rollouts that train in no step.
    """

    steps: list[list[list[Pack]]]
    dropped: int


def packed(rollouts: Sequence[Rollout], most: int) -> list[Pack]:
    """Return packs of at most `most` tokens, filled in the order of the rollouts."""
    packs: list[Pack] = []
    size = most + 1
    for one in rollouts:
        size += len(one.tokens)
        if size > most or not packs:
            packs.append([])
            size = len(one.tokens)
        packs[-1].append(one)
    return packs


def cut(rollouts: Sequence[Rollout], ranks: int, most: int, mini_batches: int) -> Cut:
    """Return the steps of a batch.

    Args:
        rollouts: of the batch.
        ranks: data-parallel ranks.
        most: tokens of a pack.
        mini_batches: steps that a batch is meant to make.
    """
    packs = packed(rollouts, most)
    own = len(packs) // ranks
    shares = [packs[own * rank : own * (rank + 1)] for rank in range(ranks)]
    together = max(math.ceil(own / mini_batches - 0.5), 1)
    rows = [list(row) for row in zip(*shares, strict=True)][: own // together * together]
    steps = [rows[at : at + together] for at in range(0, len(rows), together)]
    trained = sum(len(pack) for rows in steps for row in rows for pack in row)
    return Cut(steps, len(rollouts) - trained)


def batches(rollouts: Sequence[Rollout], size: int) -> Iterator[Sequence[Rollout]]:
    """Yield the batches that are generated together, each of `size` rollouts."""
    for at in range(0, len(rollouts) // size * size, size):
        yield rollouts[at : at + size]
