"""What the ranks can be asked to do: functions of plain values that return plain values, found by name.

The subjects lie above this room, and are imported by their names when a rank runs them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from ds_parity.errors import ConfigError
from ds_parity.parity.running import half_precision
from ds_parity.parity.running.functions import resolve
from ds_parity.parity.running.inspection import inspect_model
from ds_parity.parity.running.memory import Peaks
from ds_parity.parity.running.own_batches import Record, begin
from ds_parity.parity.running.recording import Recorder
from ds_parity.parity.running.scenario import Scenario
from ds_parity.trace import StepRecord

_SUBJECTS = "ds_parity.parity.subjects"
_ENGINES = {
    "ds_parity": f"{_SUBJECTS}.candidate:run",
    "deepspeed": f"{_SUBJECTS}.references.fixed:run_with_fixed_steps",
    "deepspeed-loop": f"{_SUBJECTS}.references.hand_driven:drive_by_hand",
    "bare": f"{_SUBJECTS}.references.hand_driven:drive_bare",
    "torch": f"{_SUBJECTS}.references.alone:train_alone",
    "clean": f"{_SUBJECTS}.controls.loop:Loop.run",
}
_WITHOUT_STEPS = (
    "train {train!r} returned without an optimizer step, so there is nothing to compare: it must run backward() and "
    "step() of every micro-batch until windows are full; let it run to the end of its micro-batches, and raise the "
    "errors that it catches, or that end a thread of its own. A map or a zip that it returns is read by nobody here"
)
_CONTROLS = f"{_SUBJECTS}.controls.known:known"


def engine_of(name: str) -> Callable[[Scenario, Record], Any]:
    """Return the engine under test, a reference, or a control: a function of a scenario that hands over its steps.

    Raises:
        KeyError: there is none of that name.
    """
    if name in _ENGINES:
        return resolve(_ENGINES[name])
    run: Callable[[Scenario, Record], Any] = resolve(_CONTROLS)()[name].run
    return run


class Around(Protocol):
    """Called just before and just after a step is written down."""

    def before(self, module: nn.Module) -> None:
        """Do what is to be done before, with the module as the step left it."""

    def after(self, module: nn.Module) -> None:
        """Do what is to be done after, with the module as the step left it."""


def run_scenario(
    scenario: dict[str, Any], engine: str, folder: str, around: Around | None = None, hypotheses: bool = True
) -> dict[str, Any]:
    """Run one scenario with one engine; the trace lies at `folder`/scenario name/`engine`.jsonl.

    Args:
        scenario: as plain values.
        engine: by its name.
        folder: for traces.
        around: called around the writing of each step.
        hypotheses: whether the torch reference computes what known faults would make of each step.

    Returns:
        `accelerator`: what it ran on.

    Raises:
        ConfigError: a training function took no step.
    """
    wanted = Scenario.from_json(scenario)
    # A training function may use collectives, so every rank calls it.
    alone_on_first = engine == "torch" and wanted.train is None
    if not alone_on_first or dist.get_rank() == 0:
        with half_precision.experiment(), Recorder(Path(folder), wanted, engine, hypotheses) as recorder:
            ran = engine_of(engine)(wanted, recorder if around is None else _Watched(recorder, around))
            if wanted.train is not None and not recorder.taken:
                raise ConfigError(_WITHOUT_STEPS.format(train=wanted.train))
        if engine != "torch":
            ran.destroy()
    # The other ranks wait, or the next call would begin while the first rank still computes.
    if alone_on_first:
        dist.barrier()
    return {"accelerator": half_precision.accelerator(wanted.dtype)}


def inspect_and_run(
    scenario: dict[str, Any], engine: str, folder: str, hypotheses: bool = True, in_one: bool = False
) -> dict[str, Any]:
    """Run one scenario as `run_scenario`, after a look at its model.

    Args:
        scenario: as plain values.
        engine: by its name.
        folder: for traces.
        hypotheses: as in `run_scenario`.
        in_one: some reference computes the rollouts of several micro-batches in one batch.

    Raises:
        ConfigError: the model can't be compared, whatever engine runs it.
    """
    inspect_model(scenario, in_one=in_one)
    return run_scenario(scenario, engine, folder, hypotheses=hypotheses)


def attempt_scenario(
    scenario: dict[str, Any], engine: str, folder: str, measured: bool = False, hypotheses: bool = True
) -> dict[str, Any]:
    """Run one scenario with one engine as `run_scenario`, and live to say what went wrong.

    Returns:
        What `run_scenario` returns, or `raised`. With `measured` also `peaks`, the most bytes that lived at a time in
        up to two windows after the first, above what lived at their start, on this rank; and `parameters`, how many
        numbers the model has.
    """
    if not measured:
        return attempted(lambda: run_scenario(scenario, engine, folder, hypotheses=hypotheses))
    meter = Peaks()
    answer = attempted(lambda: run_scenario(scenario, engine, folder, meter, hypotheses))
    meter.end()
    return {**answer, "peaks": meter.bytes, "parameters": meter.parameters}


def attempted(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `action` returns, or its error as `raised`, so that one failure doesn't end the job of all."""
    # A configuration fails alike on all ranks; where it doesn't, the ranks hang, and the job is ended and begun anew.
    try:
        return dict(action())
    except Exception as error:
        traceback.print_exc()
        return {"raised": f"{type(error).__name__}: {error}"}


class _Watched:
    """A record with something around it."""

    def __init__(self, record: Recorder, around: Around) -> None:
        self._record, self._around, self.sketch = record, around, record.sketch

    def begin(self, module: nn.Module) -> None:
        begin(self._record, module)

    def __call__(self, step: StepRecord, module: nn.Module) -> None:
        self._around.before(module)
        self._record(step, module)
        self._around.after(module)
