"""Ranks that have the same losses in window after window: they train on the same data, and no error shows it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

_LOG = logging.getLogger("ds_parity")

LOOKED_AT: Final = 8
"""So many windows are looked at, the first ones of a run: one or two may begin with a loss that is known (log 2)."""
_DIGESTS: Final = 2**18 - 5  # a prime: sums of their squares are exact in float64 on 2**17 ranks


class SameLosses:
    """Looks at the losses of the first windows, and warns once.

    Digests of the bits are compared, as places are (`wire.Place`): losses of other data may be equal in six digits.

    Args:
        ranks: that sum (>= 1).
        parted: whether they are to have other data; else they have the same loss by right.
        group: these ranks, of which the first one warns; a job may have others.
        device: where losses are.
    """

    def __init__(self, ranks: int, *, parted: bool, group: Any, device: torch.device) -> None:
        self._ranks, self._parted, self._group, self._told = ranks, parted, group, False
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        self.begin()

    def begin(self) -> None:
        """Look at the next windows anew."""
        self._digest = self._moves = self._zero
        self._first: torch.Tensor | None = None
        self._seen: list[torch.Tensor] = []

    def look(self, loss: torch.Tensor) -> None:
        """Look at a loss of the open window, without waiting for the device.

        Args:
            loss: scalar float64, before it is weighed: what ranks weigh may differ.
        """
        self._digest = (self._digest + loss.view(torch.int64) % _DIGESTS) % _DIGESTS
        # A loss that is one number for ever is that for any data.
        self._first = loss if self._first is None else torch.where(self._first.isfinite(), self._first, loss)
        self._moves = self._moves | ((loss != self._first) & loss.isfinite())

    def taken(self) -> torch.Tensor:
        """Return this rank's numbers of the window for a sum over ranks, (3,) float64, and begin the next."""
        digest, self._digest = self._digest, self._zero
        return torch.stack([digest, digest * digest, self._moves]).to(torch.float64)

    def take_back(self, taken: torch.Tensor) -> None:
        """Go on with a window that `taken` has ended."""
        self._digest = (self._digest + taken[0].to(torch.int64)) % _DIGESTS

    def note(self, summed: torch.Tensor) -> None:
        """Note a window; the last one is waited for.

        Args:
            summed: over the ranks, what `taken` returned on each of them.
        """
        self._seen.append(summed)
        if len(self._seen) < LOOKED_AT:
            return
        seen: Sequence[Sequence[float]] = torch.stack(self._seen).tolist()
        self._seen.clear()
        # By Cauchy-Schwarz that is so only where all are equal; in whole numbers it is exact.
        alike = all(self._ranks * int(squares) == int(digests) ** 2 for digests, squares, _ in seen)
        if self._parted and alike and seen[-1][-1] and not self._told and dist.get_rank(self._group) == 0:
            self._told = True
            _LOG.warning(
                "all ranks have had the same loss in each of %d windows. Either they train on the same data, so that "
                "each rollout is counted once for every rank: give each rank data of its own (a DistributedSampler, "
                "rollouts[rank::ranks], or plan(), which hands each rank its part). Or the loss is computed of what "
                "all ranks have gathered, and nothing is wrong. This is said once",
                LOOKED_AT,
            )
