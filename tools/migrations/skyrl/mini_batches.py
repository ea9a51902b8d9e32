"""How SkyRL cuts the sequences of a training batch into mini-batches, in our words: by sequences, and since by prompts.

By sequences (read in 25e2d415, skyrl/backends/skyrl_train/distributed/dispatch.py:190-206 and
skyrl/train/trainer.py:1103-1115): each takes `policy_mini_batch_size x n_samples_per_prompt` of them, and their number
must be a multiple of that.

By prompts (read in a9564572, skyrl/train/dataset/preprocess.py:316-390 and dispatch.py:147-166; pull request #1529, in
place of #1483): each takes the sequences of so many prompts, and sequences without loss are added until all ranks have
as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from ds_parity.errors import ConfigError
from ds_parity.planning import Rollout


def by_sequences(sequences: Sequence[Rollout], size: int) -> list[Sequence[Rollout]]:
    """Return mini-batches of `size` sequences.

    Raises:
        ConfigError: the number of sequences is no multiple of it; SkyRL has an assertion there.
    """
    if len(sequences) % size:
        raise ConfigError(
            f"{len(sequences)} sequences make no mini-batches of {size}: their number must be a multiple; SkyRL's "
            "assertion says 'data batch size must be divisible by mini_batch_size'"
        )
    return [sequences[at : at + size] for at in range(0, len(sequences), size)]


def by_prompts(sequences: Sequence[Rollout], prompts: int) -> list[Sequence[Rollout]]:
    """Return mini-batches of so many prompts; all sequences of a prompt stand together."""
    ends = [0]
    for _, group in groupby(sequences, key=lambda one: one.prompt_id):
        ends.append(ends[-1] + len(list(group)))
    edges = ends[:-1:prompts] + ends[-1:]
    return [sequences[start:end] for start, end in pairwise(edges)]


def shares(mini_batch: Sequence[Rollout], ranks: int) -> list[Sequence[Rollout]]:
    """Return each rank's share: as many sequences for all, the last ones without loss where that does not divide."""
    missing = -len(mini_batch) % ranks
    first = mini_batch[0]
    # A copy without loss tokens: all of it is its prompt.
    silent = replace(first, prompt_id="padding", prompt_length=len(first.tokens), rollout_id="padding")
    padded = [*mini_batch, *[silent] * missing]
    size = len(padded) // ranks
    return [padded[size * rank : size * (rank + 1)] for rank in range(ranks)]
