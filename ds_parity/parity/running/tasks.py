"""What the ranks can be asked to do: functions of plain values that return plain values, found by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from ds_parity.parity.running import half_precision
from ds_parity.parity.running.own_batches import Record
from ds_parity.parity.running.recording import Recorder
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects import candidate
from ds_parity.parity.subjects.controls.known import known
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.references import alone, fixed, hand_driven
from ds_parity.trace import StepRecord

ENGINES: dict[str, Callable[[Scenario, Record], Any]] = {
    "ds_parity": candidate.run,
    "deepspeed": fixed.run,
    "deepspeed-loop": hand_driven.run,
    "torch": alone.run,
    "clean": Loop.run,
}


def engine_of(name: str) -> Callable[[Scenario, Record], Any]:
    """Return the engine under test, a reference, or a control."""
    return ENGINES[name] if name in ENGINES else known()[name].run


class Around(Protocol):
    """Told just before and just after a step is written down."""

    def before(self, module: nn.Module) -> None:
        """Told before, with the module as the step left it."""

    def after(self, module: nn.Module) -> None:
        """Told after."""


def run_scenario(scenario: dict[str, Any], engine: str, folder: str, around: Around | None = None) -> dict[str, Any]:
    """Run one scenario with one engine; the trace lies at `folder`/scenario name/`engine`.jsonl.

    Returns:
        `accelerator`: what it ran on.
    """
    wanted = Scenario.from_json(scenario)
    alone_on_first = engine == "torch"
    if not alone_on_first or dist.get_rank() == 0:
        with half_precision.experiment(), Recorder(Path(folder), wanted, engine) as recorder:
            ran = engine_of(engine)(wanted, recorder if around is None else _watched(recorder, around))
        if not alone_on_first:
            ran.destroy()
    if alone_on_first:
        dist.barrier()
    return {"accelerator": half_precision.accelerator(wanted.dtype)}


def _watched(record: Record, around: Around) -> Record:
    def watched(step: StepRecord, module: nn.Module) -> None:
        around.before(module)
        record(step, module)
        around.after(module)

    return watched
