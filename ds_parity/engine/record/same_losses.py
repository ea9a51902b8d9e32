"""Ranks that have the same loss in window after window: they train on the same data, and no error shows it."""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
import torch.distributed as dist

_LOG = logging.getLogger("ds_parity")

LOOKED_AT: Final = 8
"""So many windows are looked at, the first ones of a run: one or two may begin with a loss that is known (log 2)."""
_ALIKE: Final = 1e-12  # of the square of the sum, whose rounding is 2e-16 times the number of ranks


class SameLosses:
    """Looks at the losses of the first windows, and warns once.

    Equal numbers are those whose squares add up to the square of their sum, over the ranks.

    Args:
        ranks: that sum (>= 1).
        parted: whether they are to have other data; else they have the same loss by right.
        group: these ranks, of which the first one warns; a job may have others.
    """

    def __init__(self, ranks: int, *, parted: bool, group: Any) -> None:
        self._ranks, self._parted, self._group = ranks, parted, group
        self._seen: list[torch.Tensor] = []

    def begin(self) -> None:
        """Look at the next windows anew."""
        self._seen.clear()

    def note(self, loss: torch.Tensor, square: torch.Tensor) -> None:
        """Note a window; the last one is waited for.

        Args:
            loss: the sum of what each rank has, scalar float64.
            square: the sum of the squares.
        """
        self._seen.append(torch.stack([loss, square]))
        if len(self._seen) < LOOKED_AT:
            return
        seen: list[list[float]] = torch.stack(self._seen).tolist()
        self._seen.clear()
        alike = all(
            total and abs(self._ranks * of_squares - total**2) <= _ALIKE * total**2 for total, of_squares in seen
        )
        # A loss that is one number for ever is that for any data.
        moves = len({total for total, _ in seen}) > 1
        if self._parted and alike and moves and dist.get_rank(self._group) == 0:
            _LOG.warning(
                "all ranks have had the same loss in each of %d windows: they seem to train on the same data, so that "
                "each rollout is counted once for every rank. Give each rank data of its own (a DistributedSampler, "
                "rollouts[rank::ranks], or plan(), which hands each rank its part). This is said once",
                LOOKED_AT,
            )
