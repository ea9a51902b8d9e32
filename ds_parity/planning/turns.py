"""Step-wise training: a trajectory of several turns as one sequence a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_parity.errors import ConfigError
from ds_parity.planning.records import Rollout


def by_turn(rollout: Rollout, ends: Sequence[int], rollout_id: str) -> tuple[Rollout, ...]:
    """Return one sequence a turn: all that came before it is its prompt, and only the turn carries the loss.

    Over all turns each loss token is scored once, after the same tokens as in the whole trajectory.

    Args:
        rollout: the trajectory.
        ends: where turns end in `rollout.tokens`: rising, the first beyond the prompt, the last one the length.
        rollout_id: by which the turns know each other.

    Raises:
        ConfigError: `ends` are none of these.
    """
    starts = [rollout.prompt_length, *ends[:-1]]
    rising = all(start < end for start, end in zip(starts, ends, strict=False))
    if not ends or not rising or ends[-1] != len(rollout.tokens):
        raise ConfigError(
            f"rollout {rollout_id!r}: turns end at {list(ends)}, must rise from beyond its prompt of "
            f"{rollout.prompt_length} tokens to its length of {len(rollout.tokens)}; give the end of every turn"
        )
    return tuple(
        replace(rollout, tokens=rollout.tokens[:end], prompt_length=start, rollout_id=rollout_id)
        for start, end in zip(starts, ends, strict=True)
    )
