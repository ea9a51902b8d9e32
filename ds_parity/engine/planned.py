"""Micro-batches of a plan: each is read by the rank for which it was made, and all ranks begin the same plan."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.ranks.wire import MOST_PLANS, Begun
from ds_parity.errors import ConfigError
from ds_parity.planning.plans import STREAMS

_KNOWN: Final = 64  # plans whose micro-batches may come in turns


def rank_of(engine: Engine) -> int:
    """Return the data-parallel rank, as `micro_batches` is to be given it (>= 0)."""
    return dist.get_rank(engine.data_parallel_group)


def plan_of(batch: Any) -> tuple[int, int] | None:
    """Return number and order of the plan that a micro-batch is part of (`MicroBatch.plan_number`), None for none."""
    number, order = getattr(batch, "plan_number", None), getattr(batch, "plan_order", None)
    return None if not number or order is None else (number, order)


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
            "where two ranks read one part, its rollouts are trained on twice, and others never; give micro_batches() "
            "the rank as it is among the data-parallel ones: dist.get_rank(engine.data_parallel_group), or in a "
            "pipeline engine.grid.get_data_parallel_id()"
        )


class PlansRead:
    """The plans whose micro-batches a rank has read from one stream.

    Their order is counted from where the stream was begun: before, ranks may have begun other numbers of plans.

    Attributes:
        untold: number and order of those of which the other ranks have not heard, as they began.
    """

    def __init__(self) -> None:
        self.untold: list[tuple[int, int]] = []
        self._known: deque[int] = deque(maxlen=_KNOWN)
        self._before = STREAMS.begun

    def read(self, batch: Any) -> None:
        """Note which plan a micro-batch is part of."""
        plan = plan_of(batch)
        if plan and plan[1] not in self._known:
            self._known.append(plan[1])
            self.untold.append((plan[0], plan[1] - self._before))

    def tell(self) -> Begun | None:
        """Return all of which the others have not heard as one, and forget them; None without any."""
        if not self.untold:
            return None
        plans, orders = zip(*self.untold, strict=True)
        self.untold = []
        return Begun(_number(plans), _number(orders))

    def copy(self) -> PlansRead:
        """Return one that goes on from here by itself."""
        other = PlansRead()
        other.untold, other._known, other._before = list(self.untold), self._known.copy(), self._before
        return other


def _number(values: tuple[int, ...]) -> int:
    return 1 + zlib.crc32(repr(values).encode()) % (MOST_PLANS - 1)
