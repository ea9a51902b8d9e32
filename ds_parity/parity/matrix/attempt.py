"""What ranks do for a cell: run one engine, and live to say what went wrong."""

from __future__ import annotations

import traceback
from typing import Any

from ds_parity.parity.probe.measure import probe as decompose
from ds_parity.parity.running import tasks
from ds_parity.parity.running.half_precision import experiment
from ds_parity.parity.running.memory import Peaks
from ds_parity.parity.running.scenario import Scenario


def run(scenario: dict[str, Any], engine: str, folder: str, measured: bool = False) -> dict[str, Any]:
    """Run a scenario with an engine, as `tasks.run_scenario`.

    Returns:
        `raised`, or with `measured`: `peaks`, the bytes that up to two windows after the first held at most above what
        was held at their start, on this rank, and `parameters`, how many numbers the model holds.
    """
    if not measured:
        return _tried(lambda: tasks.run_scenario(scenario, engine, folder))
    meter = Peaks()
    ran = _tried(lambda: tasks.run_scenario(scenario, engine, folder, around=meter))
    meter.end()
    return {**ran, "peaks": meter.bytes, "parameters": meter.parameters}


def probe(scenario: dict[str, Any], subject: str) -> dict[str, Any]:
    """Probe a window; `raised` where that failed."""
    return _tried(lambda: decompose(scenario, subject))


def refusal(scenario: dict[str, Any]) -> dict[str, Any]:
    """Build the engine under test and return as `raised` what it says."""

    def build() -> dict[str, Any]:
        with experiment():
            tasks.ENGINES["ds_parity"](Scenario.from_json(scenario), lambda record, module: None)
        return {}

    return _tried(build)


def _tried(action: Any) -> dict[str, Any]:
    # A configuration fails alike on all ranks; where it doesn't, the ranks hang, and the job is ended and begun anew.
    try:
        return dict(action())
    except Exception as error:
        traceback.print_exc()
        return {"raised": f"{type(error).__name__}: {error}"}
