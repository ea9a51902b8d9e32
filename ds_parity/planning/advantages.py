"""Advantages: what a reward is worth beside the other rewards of its prompt (GRPO)."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, Final

from ds_parity.errors import ConfigError
from ds_parity.planning.keys import plain, refuse_two_kinds, refuse_what_is_no_key

# Two rewards that eight operations in fp32 have computed differ by 16 roundings of 2**-24, though they mean the same.
_ROUNDING: Final = 2.0**-20


def group_advantages(prompt_ids: Iterable[Hashable], rewards: Iterable[float], *, by_std: bool = True) -> list[float]:
    """Compute (reward - mean) / std for each reward, over the rewards of the same prompt.

    This is the outcome supervision of GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2), with the population's
    standard deviation and no epsilon. Where all rewards of a group are equal, as in a group of one, advantages are 0.

    Rewards count as equal where the greatest and the smallest of a group differ by at most 2**-20 (about 1e-6) of the
    largest absolute reward of the group: so far eight operations in fp32 may round two rewards apart that mean the
    same (0.1 + 0.2 and 0.3). Divided by its own standard deviation, rounding would be as strong a signal as any
    reward. The bound is relative, so rewards of any size keep their differences: 1000.0 and 1000.1, or 1e-12 and 2e-12.

    Args:
        prompt_ids: (n,) the prompt of each rollout, by its text, its number, or anything else that can be a key of a
            dict; equal ones form a group, wherever they are. A tensor or an array is taken by its values.
        rewards: (n,) finite numbers, likewise.
        by_std: whether to divide by the standard deviation; without it the advantage is reward - mean, as in Dr. GRPO
            (Liu et al. 2025, arXiv 2503.20783, section 3.2).

    Returns:
        (n,) advantages, in the order of the rewards.

    Raises:
        ConfigError: there are not as many rewards as prompts, a reward is no finite number, two rewards are further
            apart than a number can say, a prompt can be no key, or one is given as a text and as a number.
    """
    prompts, earnings = prompts_and_rewards(prompt_ids, rewards)
    refuse_two_kinds(prompts)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        groups[prompt].append(index)
    relative = [0.0] * len(earnings)
    for prompt, members in groups.items():
        earned = [earnings[index] for index in members]
        if max(earned) - min(earned) <= _ROUNDING * max(map(abs, earned)):
            continue
        if not math.isfinite(max(earned) - min(earned)):
            raise ConfigError(
                f"rewards of prompt {prompt!r} are {min(earned):g} and {max(earned):g}: no number is so large as what "
                "lies between them; scale them down"
            )
        # Both are exact up to their last place, so that a large mean takes nothing from a small difference.
        mean, spread = statistics.mean(earned), statistics.pstdev(earned)
        if spread == 0:  # of rewards so small that it has no number
            continue
        for index in members:
            relative[index] = (earnings[index] - mean) / (spread if by_std else 1.0)
    return relative


def prompts_and_rewards(prompt_ids: Iterable[Any], rewards: Iterable[Any]) -> tuple[list[Hashable], list[float]]:
    """Return both as plain values, checked; the arguments and errors are those of `group_advantages`."""
    prompts, earned = _listed("prompt ids", prompt_ids), _listed("rewards", rewards)
    if len(prompts) != len(earned):
        raise ConfigError(f"{len(earned)} rewards for {len(prompts)} prompt ids: give one of each for every rollout")
    for index, prompt in enumerate(prompts):
        refuse_what_is_no_key(f"prompt id {index} is {prompt!r} ({type(prompt).__name__})", prompt)
    return prompts, [_number(prompt, reward) for prompt, reward in zip(prompts, earned, strict=True)]


def _listed(what: str, values: Iterable[Any]) -> list[Any]:
    # Tensors are equal to themselves alone as keys, so each rollout would be a group of its own.
    values, kind = plain(values), type(values).__name__
    if not isinstance(values, Iterable):
        raise ConfigError(f"{what} are a {kind} without a length: give one for every rollout, in a list")
    return [plain(value) for value in values]


def _number(prompt: Hashable, reward: Any) -> float:
    said = f"reward of prompt {prompt!r} is {reward!r}: it must be"
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(reward, str | bytes):
        raise ConfigError(f"{said} a number; give one for every rollout, or leave the rollout out")
    if not math.isfinite(number):
        raise ConfigError(f"{said} finite; leave the rollout out, or say what it earned")
    return number
