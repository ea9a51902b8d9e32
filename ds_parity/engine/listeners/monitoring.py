"""DeepSpeed's monitors (tensorboard, csv, wandb, comet), given what DeepSpeed does not know, over rollouts.

After each optimizer step DeepSpeed 0.19.8 writes `Train/Samples/lr` and, in fp16, `Train/Samples/loss_scale`, at
`global_samples`. The LR is left to it: it is the one that holds once so many rollouts were consumed. The scale is
written here. DeepSpeed writes no loss, and could only know a rank's micro-batches.
"""

from __future__ import annotations

from ds_parity.engine.driver import Driver
from ds_parity.engine.internals.monitor import LOSS_SCALE, Monitors
from ds_parity.engine.record.finished import Finished


def show(driver: Driver) -> None:
    """Give every finished step of `driver` to DeepSpeed's monitors, where one is enabled, on the first rank.

    Reading its figures waits for the accelerator, on that rank alone.
    """
    monitors = Monitors(driver.engine)
    if not monitors.enabled:
        return
    monitors.take_over()

    def write(finished: Finished) -> None:
        monitors.write(_events(finished))

    driver.boundary.on_step.append(write)


def _events(finished: Finished) -> dict[str, float]:
    record = finished.record
    events = {"Train/Samples/train_loss": record.loss, LOSS_SCALE: record.loss_scale}
    events |= {"Train/Samples/rollouts": record.rollouts, "Train/Samples/passes": record.passes}
    events |= {f"Train/Metrics/{name}": mean for name, mean in record.metrics.items()}
    return {name: value for name, value in events.items() if value is not None}
