"""Micro-batches of a plan: each is read by the rank for which it was made, and all ranks begin the same plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Final

from ds_parity.engine.ranks.exchange import WRONG_PLAN
from ds_parity.errors import ConfigError, RankDesyncError
from ds_parity.planning.plans import STREAMS

_KEPT: Final = 256


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
    """The plans whose micro-batches a rank has read.

    Attributes:
        begun: numbers of the plans of which the other ranks have heard, the last 256, as they began.
        untold: those of which they have not.
    """

    def __init__(self) -> None:
        self.begun: deque[int] = deque(maxlen=_KEPT)
        self.untold: list[int] = []

    def read(self, batch: Any) -> None:
        """Note which plan a micro-batch is part of (`MicroBatch.plan_number`)."""
        plan = getattr(batch, "plan_number", None)
        if plan and plan not in self.untold and plan not in self.begun:
            self.untold.append(plan)

    def tell(self) -> tuple[int, ...]:
        """Return those of which the others have not heard, and take it that they will."""
        told, self.untold = tuple(self.untold), []
        self.begun += told
        return told

    def copy(self) -> PlansRead:
        """Return one that goes on from here by itself."""
        other = PlansRead()
        other.begun, other.untold = self.begun.copy(), list(self.untold)
        return other


def refuse_different_plans(gather: Callable[[Any], Sequence[Any]], begun: Sequence[int]) -> None:
    """Raise where ranks have begun different plans; all ranks come, once they know that they may have.

    Ranks may leave out micro-batches of a plan, or all of them, and so begin the next one earlier than others. But each
    begins the streams of the same plans, one after the other: of two ranks the one that is behind knows no plan that
    the other does not know. Where each has begun one that the other does not know, they do not plan the same.

    Args:
        gather: returns what all ranks give it.
        begun: numbers of the plans whose micro-batches this rank has read, as they began.

    Raises:
        RankDesyncError: on every rank.
    """
    of_ranks = gather(tuple(begun))
    told = dict.fromkeys(plan for plans in of_ranks for plan in plans)
    lacks = gather(frozenset(plan for plan in told if plan not in STREAMS and plan not in begun))
    lacking = [rank for rank, missing in enumerate(lacks) if missing]
    for rank, other in combinations(lacking, 2):
        own = next((plan for plan in of_ranks[rank] if plan in lacks[other]), None)
        others = next((plan for plan in of_ranks[other] if plan in lacks[rank]), None)
        if own is not None and others is not None:
            raise RankDesyncError(
                f"ranks take their micro-batches from different plans (rank {rank} begins plan {own:08x} where rank "
                f"{other} begins plan {others:08x}): {WRONG_PLAN}"
            )
