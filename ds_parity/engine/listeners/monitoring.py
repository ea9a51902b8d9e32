"""DeepSpeed's monitors (tensorboard, csv, wandb, comet), given what DeepSpeed doesn't know, over rollouts.

After each optimizer step DeepSpeed 0.19.8 writes `Train/Samples/lr` and, in fp16, `Train/Samples/loss_scale`, at
`global_samples`. The LR is left to it: as it stands once so many rollouts were consumed. The scale is written here: inside
`step()` it is the one that corrects the gradient. DeepSpeed writes no loss, and could only know a rank's micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import wrapt

from ds_parity.engine.driver import Driver
from ds_parity.engine.record.finished import Finished

_LOSS_SCALE = "Train/Samples/loss_scale"


def show(driver: Driver) -> None:
    """Give every finished step of `driver` to DeepSpeed's monitors, where one is enabled, on the first rank.

    Reading its figures waits for the accelerator, on that rank alone.
    """
    engine = driver.engine
    if not engine.monitor.enabled or dist.get_rank() != 0:
        return
    monitor = engine.monitor
    engine.monitor = _WithoutLossScale(monitor)

    def write(finished: Finished) -> None:
        monitor.write_events([(name, value, engine.global_samples) for name, value in _events(finished).items()])

    driver.boundary.on_step.append(write)


class _WithoutLossScale(wrapt.ObjectProxy[Any]):
    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        self.__wrapped__.write_events([event for event in event_list if event[0] != _LOSS_SCALE])


def _events(finished: Finished) -> dict[str, float]:
    record = finished.record
    events = {"Train/Samples/train_loss": record.loss, _LOSS_SCALE: record.loss_scale}
    events |= {"Train/Samples/rollouts": record.rollouts, "Train/Samples/passes": record.passes}
    events |= {f"Train/Metrics/{name}": mean for name, mean in record.metrics.items()}
    return {name: value for name, value in events.items() if value is not None}
