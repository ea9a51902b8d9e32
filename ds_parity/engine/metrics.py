"""The step's loss, weighted over ranks and passes: summed where it is computed, read only when somebody asks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_parity.engine.hostsum import HostSum


class LossMeter:
    """Sums weight * loss on the device, without waiting for it; one small sum over ranks a step.

    Args:
        device: where losses are.
        group: the ranks that step together, sequence-parallel peers included.
        host_group: the same ranks over gloo, for losses that are on the host anyway; None with one rank.
        peers: ranks that share a micro-batch and each add its whole loss, 1 without sequence parallelism.
    """

    def __init__(self, device: torch.device, group: Any, host_group: Any, peers: int = 1) -> None:
        self._group = group
        self._peers = peers
        self._over_host = HostSum(host_group) if host_group is not None else None
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, units: int) -> None:
        """Add a loss that stands for `units` (its weight where it is a mean, 1 where it is a sum)."""
        self._sum = self._sum + loss.detach().to(torch.float64) * units

    def reset(self) -> None:
        """Forget the window's losses."""
        self._sum = torch.zeros_like(self._sum)

    def settle(self) -> torch.Tensor:
        """Return the window's sum over all micro-batches, still on the device, and start the next window at 0."""
        total = self._over_ranks()
        return total if self._peers == 1 else total / self._peers

    def _over_ranks(self) -> torch.Tensor:
        total = self._sum
        self.reset()
        if self._over_host is None:
            return total
        if total.device.type == "cpu":
            return self._over_host.start(total).wait()
        dist.all_reduce(total, group=self._group)
        return total
