"""A scheduler whose step() does not take what it is given, or raises a TypeError, is stepped by the batch size.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/scheduler_by_batch_size.py

_take_model_step of runtime/engine.py catches every TypeError of `lr_scheduler.step(**lr_kwargs)` and calls
`lr_scheduler.step(train_batch_size)`: so ReduceLROnPlateau without a metric takes the batch size for it and lowers the
learning rate for ever, and StepLR that is given a metric stands at the epoch of that number.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from _places import exit_code, tell
from torch.optim import lr_scheduler

ROWS = 3


class Broken(lr_scheduler.LRScheduler):
    """A scheduler with a fault of its own, which keeps what it was called with."""

    def get_lr(self) -> list[float]:
        """Return the learning rates as they are."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: Any = None) -> None:
        """Raise where it is given nothing, but for the first call, which torch makes itself."""
        self.given = epoch
        if epoch is None and self._step_count > 0:
            raise TypeError("unsupported operand: a fault of the scheduler's own")
        self._step_count = 1


def given(scheduler: Callable[[torch.optim.Optimizer], Any], name: str, lr_kwargs: dict[str, float] | None) -> Any:
    """Return what a scheduler was given by one step; None where the step has raised."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 0},
    }
    model = torch.nn.Linear(4, 1)
    engine, _, _, built = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, lr_scheduler=scheduler
    )
    engine.backward(engine(torch.ones(ROWS, 4, device=engine.device)).pow(2).mean())
    try:
        engine.step(lr_kwargs=lr_kwargs)
    except TypeError:
        return None
    value = getattr(built, name)
    return value / (ROWS * engine.dp_world_size)


def main() -> dict[str, str]:
    """Step three schedulers, each once."""
    deepspeed.init_distributed()
    return tell(
        {
            "ZeRO 0, ReduceLROnPlateau without a metric": partial(given, lr_scheduler.ReduceLROnPlateau, "best", None),
            "ZeRO 0, StepLR with a metric": partial(
                given, partial(lr_scheduler.StepLR, step_size=1), "last_epoch", {"metrics": 1.0}
            ),
            "ZeRO 0, a TypeError of its own": partial(given, Broken, "given", None),
        },
        said=lambda value: "it raises" if value is None else f"it was given {value:g} times the batch size",
        right=lambda value: value is None,
        fault=lambda value: value == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
