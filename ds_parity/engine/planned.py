"""Micro-batches of a plan: each is read by the rank for which it was made, and all ranks begin the same plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.ranks.wire import Begun
from ds_parity.errors import ConfigError

_WAITING: Final = 4  # plans that may begin between two exchanges, and are told one by one


def rank_of(engine: Engine) -> int:
    """Return the data-parallel rank, as `micro_batches` is to be given it (>= 0)."""
    return dist.get_rank(engine.data_parallel_group)


def plan_of(batch: Any) -> int:
    """Return the number of the plan that a micro-batch is part of (`Plan.number`), 0 for none."""
    return getattr(batch, "plan_number", None) or 0


def refuse_plan_of_others(batch: Any, ranks: int, own: Callable[[], int], what: str) -> None:
    """Raise where a micro-batch was planned for another number of ranks, or for another rank.

    Args:
        batch: the micro-batch.
        ranks: data-parallel ranks that train (>= 1).
        own: returns the data-parallel rank that reads it (>= 0).
        what: which micro-batch of what it is, for the message.

    Raises:
        ConfigError: with the way out.
    """
    planned_for, planned_rank = getattr(batch, "planned_for", None), getattr(batch, "plan_rank", None)
    if planned_for not in (None, ranks):
        raise ConfigError(
            f"{what} is of a plan for {planned_for} data-parallel ranks, and {ranks} train: some of the plan's "
            "micro-batches would run nowhere, or on no rank of their own; plan with dp_world_size=engine.dp_world_size"
        )
    if planned_rank is not None and planned_rank != (rank := own()):
        raise ConfigError(
            f"{what} is that of data-parallel rank {planned_rank} in its plan, and data-parallel rank {rank} reads it: "
            "some rollouts would be trained on twice, and those of this rank never; give micro_batches() the rank as "
            "it is among the data-parallel ones: dist.get_rank(engine.data_parallel_group), or in a pipeline "
            "engine.grid.get_data_parallel_id()"
        )


class PlansRead:
    """The plans whose micro-batches a rank has read from one stream.

    Attributes:
        untold: those of which the other ranks have not heard, in their order.
    """

    def __init__(self) -> None:
        self.untold: deque[Begun] = deque(maxlen=_WAITING)
        self._last, self._begun = 0, 0

    def read(self, batch: Any) -> None:
        """Note which plan a micro-batch is part of."""
        plan = plan_of(batch)
        if plan and plan != self._last:
            self.untold.append(Begun(plan, self._begun))
            self._last, self._begun = plan, self._begun + 1

    def tell(self) -> Begun | None:
        """Return the first of which the others have not heard, and forget it; None without one."""
        return self.untold.popleft() if self.untold else None

    def copy(self) -> PlansRead:
        """Return one that goes on from here by itself."""
        other = PlansRead()
        other.untold.extend(self.untold)
        other._last, other._begun = self._last, self._begun
        return other
