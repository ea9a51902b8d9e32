"""Advantages of groups whose rollouts lie on different ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ds_parity.engine.ranks.hostsum import PlacedSum
from ds_parity.errors import ConfigError
from ds_parity.planning.advantages import group_advantages


def gathered_advantages(
    prompt_ids: Sequence[Hashable], rewards: Sequence[float], over: PlacedSum | None, first: bool, *, by_std: bool
) -> list[float]:
    """Return the advantages of this rank's rewards among those of all ranks; one gather of objects on the host.

    Args:
        prompt_ids: (n,) of this rank, n may differ and be 0.
        rewards: (n,) of this rank.
        over: the ranks; None where there is one.
        first: whether this rank's are to be counted: one of those that share a micro-batch.
        by_std: as in `group_advantages`.

    Raises:
        ConfigError: on a rank there are not as many rewards as prompts; raised on all of them.
        RankDesyncError: not every rank is here.
        RuntimeError: a rank is gone.
    """
    own = [float(reward) for reward in rewards]
    gathered: list[Any] = [(list(prompt_ids), own, first)]
    if over is not None:
        gathered = over.gather(gathered[0])
    for rank, (theirs, earned, _) in enumerate(gathered):
        if len(theirs) != len(earned):
            raise ConfigError(
                f"rank {rank} of those that step together gave {len(earned)} rewards for {len(theirs)} prompts"
            )
    counted = [one for ids, earned, counts in gathered if counts for one in zip(ids, earned, strict=True)]
    advantages = group_advantages([prompt for prompt, _ in counted], [r for _, r in counted], by_std=by_std)
    # Rewards that are equal in one group have one advantage, so this rank's are looked up by what they are.
    of = dict(zip(counted, advantages, strict=True))
    return [of[prompt, reward] for prompt, reward in zip(prompt_ids, own, strict=True)]
