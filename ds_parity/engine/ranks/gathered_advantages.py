"""Advantages of groups whose rollouts lie on different ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch.distributed as dist

from ds_parity.errors import ConfigError
from ds_parity.planning.advantages import group_advantages


def gathered_advantages(
    prompt_ids: Sequence[Hashable], rewards: Sequence[float], group: Any, first: bool, *, by_std: bool
) -> list[float]:
    """Return the advantages of this rank's rewards among those of all ranks; one gather of objects on the host.

    Args:
        prompt_ids: (n,) of this rank, n may differ and be 0.
        rewards: (n,) of this rank.
        group: a gloo group; None where there is one rank.
        first: whether this rank's are to be counted: one of those that share a micro-batch.
        by_std: as in `group_advantages`.

    Raises:
        ConfigError: on a rank there are not as many rewards as prompts; raised on all of them.
    """
    own = [float(reward) for reward in rewards]
    gathered: list[Any] = [(list(prompt_ids), own, first)]
    if group is not None:
        sent, gathered = gathered[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, sent, group=group)
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
