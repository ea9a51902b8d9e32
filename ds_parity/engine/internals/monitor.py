"""DeepSpeed's monitors (tensorboard, csv, wandb, comet), which write what they are given."""

from __future__ import annotations

import torch.distributed as dist
import wrapt

from ds_parity.engine.internals.surface import Engine, Monitor

LOSS_SCALE = "Train/Samples/loss_scale"


class Monitors:
    """The monitors of an engine, in front of which the loss scale that DeepSpeed writes is left out.

    Inside `step()` that scale is the one that corrects the gradient, so the true one is written by ds_parity.

    Args:
        engine: the bare DeepSpeed engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._monitor = engine.monitor

    @property
    def enabled(self) -> bool:
        """Whether anything is written, on this rank."""
        return self._monitor.enabled and dist.get_rank() == 0

    def take_over(self) -> None:
        """Let DeepSpeed write no loss scale from here on."""
        self._engine.monitor = _WithoutLossScale(self._monitor)

    def write(self, numbers: dict[str, float]) -> None:
        """Write numbers by name, at the rollouts that were consumed."""
        self._monitor.write_events([(name, value, self._engine.global_samples) for name, value in numbers.items()])


class _WithoutLossScale(wrapt.ObjectProxy[Monitor]):
    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        self.__wrapped__.write_events([event for event in event_list if event[0] != LOSS_SCALE])
