"""Running cells: one launched set of ranks for each number of ranks, begun anew behind a cell that ended it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ds_parity.errors import HarnessError
from ds_parity.parity.matrix.cells import Cell
from ds_parity.parity.running.launch import Call, Job, run_job, said
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.verification.verify import ATTEMPT_SCENARIO, title

Progress = Callable[[int, str], None]
Answers = dict[str, dict[str, Any]]

_SUBJECT = "ds_parity.parity.subjects.candidate:run"
_ATTEMPT = "ds_parity.parity.matrix.attempt"


def calls_of(cell: Cell, folder: Path) -> tuple[Call, ...]:
    """Return what ranks run for a cell; titles say which answer is whose."""
    if cell.lacking is not None or cell.refusal is not None:
        return ()
    if cell.stage in cell.variant.refused:
        return (Call(f"{cell.name}: refusal", f"{_ATTEMPT}:attempt_engine", {"scenario": cell.ragged.to_json()}),)
    checks = cell.checks()
    calls = [_run(cell.ragged, engine, folder) for engine in ("deepspeed-loop", "torch") if engine in checks]
    calls.append(_run(cell.ragged, "ds_parity", folder))
    if "deepspeed" in checks:
        calls += [_run(cell.uniform, engine, folder) for engine in ("deepspeed", "ds_parity")]
    if "probe" in checks:
        arguments = {"scenario": cell.probed.to_json(), "subject": _SUBJECT}
        calls.append(Call(cell.probed.name, f"{_ATTEMPT}:attempt_probe", arguments))
    return tuple(calls)


def run_cells(
    cells: Iterable[Cell], folder: Path, progress: Progress = lambda done, title: None, *, patience: float = 120.0
) -> Answers:
    """Run all cells and return what each call answered, by its title; what ended the ranks is an answer too.

    Args:
        cells: of the matrix.
        folder: for traces and the ranks' logs.
        progress: called with the number of calls that are done, and the title of the one under way.
        patience: seconds that a single call may take.
    """
    answers: Answers = {}
    for ranks, group in groupby(sorted(cells, key=lambda cell: cell.processes), key=lambda cell: cell.processes):
        calls = [call for cell in group for call in calls_of(cell, folder)]
        launches = 0
        while calls:
            job = Job(tuple(calls), folder / f"ranks{ranks}-{launches}", ranks, 3600.0, patience=patience)
            left = _launch(job, answers, progress)
            if len(left) == len(calls):
                raise HarnessError(f"the ranks could not be started: {answers[calls[0].title]['raised']}")
            calls, launches = list(left), launches + 1
    return answers


def _run(scenario: Scenario, engine: str, folder: Path) -> Call:
    measured = scenario.name.endswith("/ragged") and engine != "torch"
    arguments = {"scenario": scenario.to_json(), "engine": engine, "folder": str(folder), "measured": measured}
    arguments["hypotheses"] = False  # cells are right as a rule, and there are many
    return Call(title(scenario, engine), ATTEMPT_SCENARIO, arguments)


def _launch(job: Job, answers: Answers, progress: Progress) -> Sequence[Call]:
    """Run a job, note its answers, return the calls behind the one that ended it."""
    before = len(answers)
    try:
        run_job(job, lambda done, at: progress(before + done, at))
    except HarnessError as error:
        finished = _note(job, answers)
        if len(finished) < len(job.calls):
            answers[job.calls[len(finished)].title] = {"raised": str(error)}
        return job.calls[len(finished) + 1 :] if any(said(job.folder, 0)) else job.calls
    _note(job, answers)
    return ()


def _note(job: Job, answers: Answers) -> list[dict[str, Any]]:
    finished = [line for line in said(job.folder, 0) if "finished" in line]
    for line in finished:
        answers[job.calls[line["finished"]].title] = line["result"] | {"seconds": line["seconds"]}
    return finished
