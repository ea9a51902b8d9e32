"""One backward: the loss is divided as it goes in, or silenced where it counts for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.record.metrics import Meter
from ds_parity.window import Counts, Weighting


class Division:
    """Divides losses by the expected total of their window, and hands them to DeepSpeed's backward.

    Args:
        adapter: of the engine's optimizer wrapper.
        meter: where the window's loss is summed.
        ranks: data-parallel ranks (>= 1).
        peers: ranks that share a micro-batch, 1 without sequence parallelism.
    """

    def __init__(self, adapter: Adapter, meter: Meter, ranks: int, peers: int) -> None:
        self._adapter = adapter
        self._engine = adapter.engine
        self._meter = meter
        self._averaged_over = adapter.averaged_over(ranks, peers)
        self._peers = peers

    def backward(
        self, loss: torch.Tensor, counts: Counts, weighting: Weighting, expected: float, **kwargs: Any
    ) -> torch.Tensor:
        """Run one backward; return the loss as it was accumulated.

        Args:
            loss: scalar.
            counts: what the micro-batch contains.
            weighting: of the window.
            expected: total that the window's losses are divided by (> 0, unless the micro-batch contributes nothing).
            **kwargs: for DeepSpeed's `backward`.
        """
        if weighting.silences(counts):
            with silenced(self._engine.module):
                self._engine.backward(loss, scale_wrt_gas=False, **kwargs)
            return torch.zeros_like(loss)
        self._meter.add(loss, 1 if weighting.reduction == "sum" else weighting.of(counts))
        scaled = loss / weighting.divisor(expected, counts, self._averaged_over, self._peers)
        scale = self._adapter.unscaled_loss_scale()
        if scale == 1:
            accumulated: torch.Tensor = self._engine.backward(scaled, scale_wrt_gas=False, **kwargs)
            return accumulated
        self._engine.backward(scaled.float() * scale, scale_wrt_gas=False, **kwargs)
        return scaled


@contextmanager
def silenced(module: torch.nn.Module) -> Iterator[None]:
    """Make whatever backward runs inside contribute exactly zero, also where the forward gave inf or NaN.

    The zeros are put in before a gradient is accumulated, so that DeepSpeed's reductions run as in any other pass.
    """
    trained = (p for p in module.parameters() if p.requires_grad)
    handles = [p.register_hook(torch.zeros_like) for p in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
