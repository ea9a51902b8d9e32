"""Step-wise training: a trajectory of several turns as one sequence per turn."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ds_parity.errors import ConfigError
from ds_parity.planning.checks import check_prompt, check_rollout
from ds_parity.planning.rollout import Rollout


def by_turn(rollout: Rollout, turns: Iterable[tuple[int, int]], rollout_id: str) -> tuple[Rollout, ...]:
    """Return one sequence per turn: all that came before it is its prompt, and only the turn carries the loss.

    Where the turns cover the completion, each loss token is scored once, after the same tokens as in the whole
    trajectory.

    Args:
        rollout: the trajectory.
        turns: (start, end) of what the policy wrote, in `rollout.tokens`: from its prompt on, rising, none empty. What
            lies between two turns (a tool's reply) is context of the later one. A tensor or an array (n, 2) of whole
            numbers is taken by its values.
        rollout_id: the name that the turns have in common; different for every rollout of a prompt.

    Raises:
        ConfigError: `turns` are none of these, or `rollout` is none.
    """
    check_rollout(f"rollout {rollout_id!r}: what its turns are of", rollout)
    check_prompt(rollout)
    given = turns if hasattr(turns, "__len__") or not isinstance(turns, Iterable) else list(turns)
    written = _pairs(given)
    edges = [rollout.prompt_length, *(edge for turn in written for edge in turn), len(rollout.tokens)]
    rising = all(before <= after for before, after in pairwise(edges))
    if not written or not rising or any(start == end for start, end in written):
        raise ConfigError(
            f"rollout {rollout_id!r}: turns are {given!r}, must be (start, end), whole numbers that rise from its "
            f"prompt of {rollout.prompt_length} tokens to at most its length of {len(rollout.tokens)}, none empty; "
            "give what the policy wrote"
        )
    return tuple(
        replace(rollout, tokens=rollout.tokens[:end], prompt_length=start, rollout_id=rollout_id)
        for start, end in written
    )


def _pairs(turns: Any) -> list[tuple[int, int]]:
    """Return turns as plain numbers, none where one of them is no pair of whole numbers."""
    pairs = []
    try:
        # The numbers of a tensor or of an array are its values; as they are they can't be compared.
        for start, end in turns.tolist() if hasattr(turns, "tolist") else turns:
            pairs.append((operator.index(start), operator.index(end)))
    except (TypeError, ValueError):
        return []
    return pairs
