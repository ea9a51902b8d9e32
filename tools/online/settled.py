"""Which groups a checkpoint contains: those are settled, all others that were claimed wait again after a kill."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

import ds_parity
from online.account import Ledger
from online.arrivals import lag_of
from online.queues import Queue

Ranges = dict[str, list[list[int]]]
"""Numbers of groups by their actor, as ranges from the first to the last of it."""


class Settled:
    """Keeps the ids that are in the weights with the checkpoint, and forgets their groups once it is whole.

    Args:
        queue: of the run.
        ledger: of this rank.
        rank: this one.

    Attributes:
        contained: ids in the last checkpoint.
    """

    def __init__(self, queue: Queue, ledger: Ledger, rank: int) -> None:
        self._queue, self._ledger, self._rank = queue, ledger, rank
        self.contained: set[str] = set()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; all ranks call it."""
        gathered: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(gathered, self._ledger.unsettled)
        except RuntimeError as error:
            raise ds_parity.RankDesyncError(
                f"rank {self._rank} waited for another rank to save a checkpoint: that one ended, its own log says "
                f"why; go on with --resume ({error})"
            ) from error
        self.contained.update(one for ids in gathered for one in ids)
        return {"stepped": ranges(self.contained)}

    def saved(self) -> None:
        """Forget what the checkpoint contains."""
        self._queue.settle(self._rank, self._ledger.unsettled)
        self._ledger.unsettled.clear()

    def resume(
        self, kept: dict[str, Any], step: int, *, resumed: bool, shares: Sequence[int] | None, size: int
    ) -> None:
        """Give back what was claimed and is not in the weights that were loaded; all ranks call it.

        Args:
            kept: what `state` gave to the checkpoint, {} without one.
            step: the window to go on with.
            resumed: whether this run goes on with another.
            shares: how many groups of each version the actor of each place samples, where a window is trained on these
                alone: all others are dropped. Empty where actors are started elsewhere; None: nothing is dropped.
            size: rollouts of such a group.
        """
        self.contained = expanded(kept.get("stepped", {}))
        if resumed:
            self._ledger.resumed(step)
            if dist.get_rank() == 0:
                self._ledger.resumed_with(dist.get_world_size(), step)
        dist.barrier()
        if resumed and dist.get_rank() == 0:
            claimed = self._queue.claimed()
            for rank in sorted(set(claimed.values())):
                own = [one for one, by in claimed.items() if by == rank]
                self._queue.settle(rank, [one for one in own if one in self.contained])
                self._queue.give_back(rank, [one for one in own if one not in self.contained])
            back = len(claimed.keys() - self.contained)
            print(
                f"resumed behind step {step}: {len(self.contained)} groups are in its weights, {back} were claimed and "
                "are not: they wait again",
                file=sys.stderr,
                flush=True,
            )
            if shares is not None:
                self._drop_all_but(step, shares, size)
        dist.barrier()

    def _drop_all_but(self, version: int, shares: Sequence[int], size: int) -> None:
        """Drop what lost weights have sampled, and what no actor of this run would: the rest is sampled anew."""
        own, left = [], Counter({f"a{place}": share for place, share in enumerate(shares)})
        while (group := self._queue.claim(self._rank)) is not None:
            lag, place = lag_of(group, version), group["id"].split(".")[0]
            asked_for = not lag and len(group["rewards"]) == size and (not shares or left[place] > 0)
            if asked_for or group["id"] in self.contained:  # of the latter nobody trains
                left[place] -= group["id"] not in self.contained
                own.append(group["id"])
                continue
            self._ledger.dropped(group, lag)
            self._queue.settle(self._rank, [group["id"]])
        self._queue.give_back(self._rank, own)


def ranges(ids: Iterable[str]) -> Ranges:
    """Return ids such as `a0.1-17` by their actor, numbers that follow each other as one range."""
    found: Ranges = {}
    for actor, number in sorted((one.rsplit("-", 1)[0], int(one.rsplit("-", 1)[1])) for one in ids):
        own = found.setdefault(actor, [])
        if own and own[-1][1] == number - 1:
            own[-1][1] = number
        else:
            own.append([number, number])
    return found


def expanded(found: Ranges) -> set[str]:
    """Return the ids of ranges."""
    return {f"{actor}-{n}" for actor, own in found.items() for first, last in own for n in range(first, last + 1)}
