"""Step-wise training: a trajectory of several turns as one sequence per turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ds_parity.errors import ConfigError
from ds_parity.planning.rollout import Rollout


def by_turn(rollout: Rollout, turns: Sequence[tuple[int, int]], rollout_id: str) -> tuple[Rollout, ...]:
    """Return one sequence per turn: all that came before it is its prompt, and only the turn carries the loss.

    Where the turns cover the completion, each loss token is scored once, after the same tokens as in the whole
    trajectory.

    Args:
        rollout: the trajectory.
        turns: (start, end) of what the policy wrote, in `rollout.tokens`: from its prompt on, rising, none empty. What
            lies between two turns (a tool's reply) is context of the later one.
        rollout_id: the name that the turns have in common; different for every rollout of a prompt.

    Raises:
        ConfigError: `turns` are none of these.
    """
    edges = [rollout.prompt_length, *(edge for turn in turns for edge in turn), len(rollout.tokens)]
    rising = all(before <= after for before, after in pairwise(edges))
    if not turns or not rising or any(start == end for start, end in turns):
        raise ConfigError(
            f"rollout {rollout_id!r}: turns are {list(turns)}, must be (start, end) that rise from its prompt of "
            f"{rollout.prompt_length} tokens to at most its length of {len(rollout.tokens)}, none empty; give what the "
            "policy wrote"
        )
    return tuple(
        replace(rollout, tokens=rollout.tokens[:end], prompt_length=start, rollout_id=rollout_id)
        for start, end in turns
    )
