"""How Fast-LLM's `docs_per_step` ends a step (read in 5afa8c70), in our words, and how windows of ds_parity end.

All ranks fetch one micro-batch each, and sum the documents of all. They go on until the sum reaches the target; the
next step counts from 0 (fast_llm/engine/training/trainer.py:159-178).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_parity.planning import Rollout

Row = list[list[Rollout]]
"""One pass: the rollouts of each rank."""


def rows(rollouts: Sequence[Rollout], ranks: int, most: int) -> list[Row]:
    """Return the passes: each rank packs its own share of the rollouts, in their order, up to `most` tokens.

    Ranks whose share makes more micro-batches than those of another leave the rest, because no rank may wait alone.
    """
    return [list(row) for row in zip(*(_packed(rollouts[rank::ranks], most) for rank in range(ranks)), strict=False)]


def by_reset(counts: Sequence[int], target: int) -> Iterator[int]:
    """Yield how many passes each step takes by their rule.

    Args:
        counts: documents of each pass on all ranks.
        target: documents of a step.
    """
    seen = passes = 0
    for count in counts:
        seen, passes = seen + count, passes + 1
        if seen >= target:
            yield passes
            seen = passes = 0


def by_carry(counts: Sequence[int], target: int) -> Iterator[int]:
    """Yield how many passes each window takes where targets are multiples from the start (`overshoot: carry`)."""
    seen = passes = 0
    for count in counts:
        before = seen // target
        seen, passes = seen + count, passes + 1
        if seen // target > before:
            yield passes
            passes = 0


def cut(counts: Sequence[int], passes: Sequence[int]) -> list[int]:
    """Return how many documents each step has."""
    ends = [sum(passes[: at + 1]) for at in range(len(passes))]
    return [sum(counts[end - size : end]) for end, size in zip(ends, passes, strict=True)]


def _packed(rollouts: Sequence[Rollout], most: int) -> list[list[Rollout]]:
    packs: list[list[Rollout]] = []
    size = most + 1
    for one in rollouts:
        size += len(one.tokens)
        if size > most:
            packs.append([])
            size = len(one.tokens)
        packs[-1].append(one)
    return packs
