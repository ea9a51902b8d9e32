"""Advantages of groups whose rollouts lie on different ranks."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ds_parity.engine.ranks.agreement import refuse_differing
from ds_parity.engine.ranks.hostsum import PlacedSum
from ds_parity.errors import ConfigError
from ds_parity.planning.advantages import group_advantages, prompts_and_rewards


def gathered_advantages(
    prompt_ids: Iterable[Hashable], rewards: Iterable[float], over: PlacedSum | None, first: bool, *, by_std: bool
) -> list[float]:
    """Return the advantages of this rank's rewards among those of all ranks; one gather of objects on the host.

    Args:
        prompt_ids: (n,) of this rank, n may differ and be 0.
        rewards: (n,) of this rank.
        over: the ranks; None where there is one.
        first: whether this rank's are to be counted: one of those that share a micro-batch.
        by_std: as in `group_advantages`.

    Raises:
        ConfigError: what a rank gave is wrong, as in `group_advantages`, or its prompts can't travel; raised on all.
        RankDesyncError: not every rank is here, or not with the same `by_std`.
        RuntimeError: a rank is gone.
    """
    if over is None:
        return group_advantages(prompt_ids, rewards, by_std=by_std)
    own, wrong = _checked(prompt_ids, rewards)
    # What is wrong travels too: the other ranks would wait for one that has raised.
    gathered = over.gather((own, first, wrong, by_std))
    for rank, (_, _, said, _) in enumerate(gathered):
        if said is not None:
            raise _of_rank(rank, said)
    refuse_differing(
        "group_advantages()",
        [{"by_std": theirs} for *_, theirs in gathered],
        "Each rank would have advantages of its own kind; give the same on every rank",
    )
    counted = [one for theirs, counts, *_ in gathered if counts for one in theirs]
    known = set(counted)
    for rank, (theirs, *_) in enumerate(gathered):
        if not known.issuperset(theirs):
            raise _of_rank(rank, "not what the rank gave that shares its micro-batch; give the same on both")
    advantages = group_advantages([prompt for prompt, _ in counted], [r for _, r in counted], by_std=by_std)
    # Rewards that are equal in one group have one advantage, so this rank's are looked up by what they are.
    of = dict(zip(counted, advantages, strict=True))
    return [of[one] for one in own]


def _of_rank(rank: int, said: str) -> ConfigError:
    return ConfigError(f"group_advantages() on rank {rank} of those that step together: {said}")


def _checked(
    prompt_ids: Iterable[Hashable], rewards: Iterable[float]
) -> tuple[list[tuple[Hashable, float]], str | None]:
    """Return this rank's prompts, each with its reward, and None; or nothing, and what is wrong with them."""
    try:
        prompts, earned = prompts_and_rewards(prompt_ids, rewards)
        _refuse_what_does_not_travel(prompts)
    except ConfigError as error:
        return [], str(error)
    return list(zip(prompts, earned, strict=True)), None


def _refuse_what_does_not_travel(prompts: Sequence[Hashable]) -> None:
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str | int):
            continue
        said = f"prompt id {index} is {prompt!r}, which"
        try:
            again: Any = pickle.loads(pickle.dumps(prompt))
        except Exception as error:  # whatever a class of the caller's raises
            raise ConfigError(
                f"{said} can't be sent to other ranks ({error}); give the prompt's text or number"
            ) from error
        if again != prompt or hash(again) != hash(prompt):
            raise ConfigError(f"{said} is another one on each rank: give the prompt's text or number")
