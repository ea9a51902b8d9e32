"""Advantages: what a reward is worth beside the other rewards of its prompt (GRPO)."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Final

from ds_parity.errors import ConfigError

# Two rewards that eight operations in fp32 have computed differ by 16 roundings of 2**-24, though they mean the same.
_ROUNDING: Final = 2.0**-20


def group_advantages(prompt_ids: Sequence[Hashable], rewards: Sequence[float], *, by_std: bool = True) -> list[float]:
    """Compute (reward - mean) / std for each reward, over the rewards of the same prompt.

    This is the outcome supervision of GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2), with the population's
    standard deviation and no epsilon. Where all rewards of a group are equal, as in a group of one, advantages are 0.

    Rewards count as equal where the greatest and the smallest of a group differ by at most 2**-20 (about 1e-6) of the
    largest absolute reward of the group: so far eight operations in fp32 may round two rewards apart that mean the
    same (0.1 + 0.2 and 0.3). Divided by its own standard deviation, rounding would be as strong a signal as any
    reward. The bound is relative, so rewards of any size keep their differences: 1000.0 and 1000.1, or 1e-12 and 2e-12.

    Args:
        prompt_ids: (n,) the prompt of each rollout; equal ones form a group, wherever they are in the list.
        rewards: (n,) finite numbers.
        by_std: whether to divide by the standard deviation; without it the advantage is reward - mean, as in Dr. GRPO
            (Liu et al. 2025, arXiv 2503.20783, section 3.2).

    Returns:
        (n,) advantages, in the order of the rewards.

    Raises:
        ConfigError: there are not as many rewards as prompts, or one is not finite.
    """
    rewards = [float(reward) for reward in rewards]
    if len(prompt_ids) != len(rewards):
        raise ConfigError(
            f"{len(rewards)} rewards for {len(prompt_ids)} prompt ids: give one of each for every rollout"
        )
    for prompt, reward in zip(prompt_ids, rewards, strict=True):
        if not math.isfinite(reward):
            raise ConfigError(
                f"reward of prompt {prompt!r} is {reward}: it must be finite; leave the rollout out, or say what it "
                "earned"
            )
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompt_ids):
        groups[prompt].append(index)
    relative = [0.0] * len(rewards)
    for members in groups.values():
        earned = [rewards[index] for index in members]
        if max(earned) - min(earned) <= _ROUNDING * max(map(abs, earned)):
            continue
        # Both are exact up to their last place, so that a large mean takes nothing from a small difference.
        mean, spread = statistics.mean(earned), statistics.pstdev(earned)
        if spread == 0:  # of rewards so small that it has no number
            continue
        for index in members:
            relative[index] = (rewards[index] - mean) / (spread if by_std else 1.0)
    return relative
