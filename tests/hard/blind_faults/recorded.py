"""The faults' traces: every fault, its clean loop and the torch reference, run in one launch for each ZeRO stage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_parity.parity.running import half_precision
from ds_parity.parity.running.launch import Call, Job, run_job
from ds_parity.parity.running.recording import Recorder
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.tasks import attempt_scenario, attempted
from ds_parity.parity.verification.control_scenarios import scenario
from tests.hard.blind_faults import ALL
from tests.hard.blind_faults.base import Fault, fitted

REFERENCES = ("torch", "clean")


def shape(fault: type[Fault], config: Mapping[str, Any]) -> Scenario:
    """Return what a fault and its references run; scenarios that differ have different names, and so folders."""
    wanted = fitted(fault, scenario(fault.scenario, dict(config)))
    needs = [str(value).rpartition(":")[2] for value in fault.needs.values()]
    return replace(wanted, name="-".join([fault.scenario, *needs]))


def record(names: Iterable[str], config: Mapping[str, Any], folder: Path, timeout: float = 280.0) -> dict[str, str]:
    """Leave the traces of some faults and of their references at folder/scenario/engine.jsonl.

    Args:
        names: of faults; those that are no faults on the configuration's ZeRO stage are left out.
        config: of ZeRO and the precision.
        folder: for the traces and the ranks' log.
        timeout: seconds for all of it.

    Returns:
        What the engines raised that left no whole trace, by scenario/engine.
    """
    stage = config.get("zero_optimization", {}).get("stage", 0)
    wanted = [(shape(ALL[name], config), name) for name in names if stage in ALL[name].stages]
    shapes = {one.name: one for one, _ in wanted}
    runs = [(one, name) for one in shapes.values() for name in REFERENCES] + wanted
    calls = tuple(
        Call(
            f"{one.name}/{name}",
            f"{__name__}:attempt",
            {"scenario": one.to_json(), "engine": name, "folder": str(folder.resolve())},
        )
        for one, name in runs
    )
    answers = run_job(Job(calls, folder.resolve() / "ranks", 2, timeout))
    raised = {one.title: answer["raised"] for one, answer in zip(calls, answers, strict=True) if "raised" in answer}
    (folder / "raised.json").write_text(json.dumps(raised, indent=1))
    return raised


def attempt(scenario: dict[str, Any], engine: str, folder: str) -> dict[str, Any]:
    """Run one scenario on this rank with a fault, or with an engine that the harness knows."""
    if engine not in ALL:
        return attempt_scenario(scenario, engine, folder)
    return attempted(lambda: _run(Scenario.from_json(scenario), engine, folder))


def _run(wanted: Scenario, name: str, folder: str) -> dict[str, Any]:
    with half_precision.experiment(), Recorder(Path(folder), wanted, name) as recorder:
        ALL[name].run(wanted, recorder).destroy()
    return {}
