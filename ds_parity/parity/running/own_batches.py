"""What every subject of a scenario needs, whoever drives it: this rank's micro-batches, and how a step is handed over.

The engine under test and the references both take these from here, so that neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_parity.collation import collate, to_device
from ds_parity.parity.running.functions import resolve
from ds_parity.parity.running.layouts import Passes
from ds_parity.parity.running.scenario import Scenario
from ds_parity.planning.rollout import MicroBatch
from ds_parity.trace import StepRecord

Record = Callable[[StepRecord, nn.Module], None]
"""Called on every rank with a finished step and the module as the step left it."""


def begin(record: Record, module: nn.Module) -> None:
    """Hand over the module before its first step, on every rank, to what wants it: its method `begin`."""
    getattr(record, "begin", _nothing)(module)


def after_building(scenario: Scenario, engine: Any) -> None:
    """Call what a scenario has for every engine that is built."""
    if scenario.built is not None:
        resolve(scenario.built)(engine)


def after_window(scenario: Scenario, engine: Any) -> None:
    """Call what a scenario has for every engine after each window."""
    if scenario.between is not None:
        resolve(scenario.between)(engine)


def _nothing(module: nn.Module) -> None:
    """Take the place of a `begin` that is not there: what is handed a step may be any function."""


def sketches(record: Record) -> Callable[[Tensor], tuple[float, ...]] | None:
    """Return how a record sketches a vector of all weights, (n,); None where it takes no hypotheses about steps."""
    return getattr(record, "sketch", None)


def own_rank(scenario: Scenario) -> int:
    """Return this rank's number among those that hold different micro-batches."""
    return dist.get_rank() // scenario.sharing


def own_batches(scenario: Scenario, passes: Passes | None = None) -> list[MicroBatch]:
    """Return this rank's micro-batches on its device, one for each pass.

    Args:
        scenario: what is run.
        passes: passes[pass][rank] to take them from; None: those of the scenario.
    """
    rank = own_rank(scenario)
    return [to_device(row[rank], _device()) for row in passes or scenario.batches()]


def stand_in(scenario: Scenario) -> MicroBatch:
    """Return a real micro-batch for idle passes: the scenario's shortest rollout, whose loss is not 0."""
    rollouts = (rollout for row in scenario.layout() for cell in row for rollout in cell)
    return to_device(collate((min(rollouts, key=lambda rollout: len(rollout.tokens)),)), _device())


def _device() -> str:
    return str(get_accelerator().current_device_name())
