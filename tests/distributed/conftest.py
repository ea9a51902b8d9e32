"""One launched set of ranks for all scenarios: a process start costs more than twenty engines."""

from pathlib import Path

import cells
import pytest
import ranked
import ranked_versions

from ds_parity.parity.launch import Call, Job, run
from ds_parity.parity.verify import call
from ds_parity.trace import read_trace

HERE = str(Path(__file__).parent)
# Modules whose TASKS the two ranks run, a function each.
TASKS = (ranked, ranked_versions)


class Launched:
    """Traces and results that a set of ranks left behind."""

    def __init__(self, folder, results):
        self.folder = folder
        self.results = results

    def trace(self, scenario, engine):
        return read_trace(self.folder / scenario.name / f"{engine}.jsonl")


def launch(folder, calls, ranks, **options):
    results = run(Job(tuple(calls), folder / "ranks", ranks, timeout=500, import_from=(HERE,), **options))
    return Launched(folder, {one.title: result for one, result in zip(calls, results, strict=True)})


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Every scenario, probe and task that runs on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    calls = [call(scenario, engine, folder) for scenario, engines in cells.RUNS for engine in engines]
    calls += [call(scenario, control, folder) for scenario, control in cells.CONTROLS]
    calls += [call(cells.same_windows(*cell, 2), "ds_parity", folder) for cell in cells.SAME_WINDOWS]
    calls += [cells.probe_call(scenario, subject) for scenario, subject in cells.PROBES]
    calls += [
        Call(name, f"{module.__name__}:{name}", {"folder": str(folder / name)})
        for module in TASKS
        for name in module.TASKS
    ]
    return launch(folder, calls, 2)


@pytest.fixture(scope="session", params=[1, 4])
def other_ranks(request, tmp_path_factory):
    """The scenarios whose windows are the same, on one rank and on four."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    scenarios = [cells.same_windows(*cell, request.param) for cell in cells.SAME_WINDOWS]
    return request.param, launch(folder, [call(s, "ds_parity", folder) for s in scenarios], request.param)
