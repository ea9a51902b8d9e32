"""One launched set of ranks for all scenarios: a process start costs more than twenty engines."""

from pathlib import Path

import cells
import pytest
import ranked
import ranked_checkpoints
import ranked_faults
import ranked_install
import ranked_metrics
import ranked_passes
import ranked_peaks
import ranked_pipelinerl
import ranked_readme
import ranked_resuming
import ranked_sequence

from ds_parity.parity.running.launch import Call, Job, run_job
from ds_parity.parity.verification.verify import call
from ds_parity.trace import read_trace

HERE = str(Path(__file__).parent)
# Modules whose TASKS the two ranks run, a function each.
TASKS = (
    ranked,
    ranked_passes,
    ranked_checkpoints,
    ranked_metrics,
    ranked_faults,
    ranked_peaks,
    ranked_readme,
    ranked_install,
    ranked_pipelinerl,
    ranked_resuming,
)


class Launched:
    """Traces and results that a set of ranks left behind."""

    def __init__(self, folder, results):
        self.folder = folder
        self.results = results

    def trace(self, scenario, engine):
        return read_trace(self.folder / scenario.name / f"{engine}.jsonl")


def launch(folder, calls, ranks, **options):
    results = run_job(
        Job(tuple(calls), folder / "ranks", ranks, timeout=1200, patience=400, import_from=(HERE,), **options)
    )
    return Launched(folder, {one.title: result for one, result in zip(calls, results, strict=True)})


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Every scenario, probe and task that runs on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    calls = [call(scenario, engine, folder) for scenario, engines in cells.RUNS for engine in engines]
    calls += dry_calls(2, folder)
    calls += [call(scenario, control, folder) for scenario, control in cells.CONTROLS]
    calls += [call(cells.ready(path), engine, folder) for path in cells.READY for engine in cells.READY_ENGINES]
    calls += [call(cells.same_windows(*cell, 2), "ds_parity", folder) for cell in cells.SAME_WINDOWS]
    calls += [cells.probe_call(scenario, subject) for scenario, subject in cells.PROBES]
    calls += [one for module in TASKS for one in tasks(module, folder)]
    return launch(folder, calls, 2)


def elsewhere(folder, ranks, saved):
    """What takes the same windows on any number of ranks, and what two ranks have saved."""
    calls = [call(cells.same_windows(*cell, ranks), "ds_parity", folder) for cell in cells.SAME_WINDOWS]
    places = {name: {"folder": str(folder / name), "saved": str(saved)} for name in ranked_checkpoints.ELSEWHERE}
    return [*calls, *[Call(name, f"ranked_checkpoints:{name}", arguments) for name, arguments in places.items()]]


def dry_calls(ranks, folder):
    """Streams without look-ahead."""
    return [call(cells.dry(stage, ranks), engine, folder) for stage, engines in cells.DRY for engine in engines]


def tasks(module, folder):
    return [Call(name, f"{module.__name__}:{name}", {"folder": str(folder / name)}) for name in module.TASKS]


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory, two_ranks):
    """The scenarios whose windows are the same on any number of ranks, and what two ranks have saved."""
    folder = tmp_path_factory.mktemp("one")
    return launch(folder, elsewhere(folder, 1, two_ranks.folder / "continued"), 1)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory, two_ranks):
    """The same, and everything that takes sequence-parallel groups of 2."""
    folder = tmp_path_factory.mktemp("four")
    calls = elsewhere(folder, 4, two_ranks.folder / "continued")
    calls += dry_calls(4, folder)
    calls += [*ranked_sequence.calls(folder), *tasks(ranked_sequence, folder)]
    return launch(folder, calls, 4)


@pytest.fixture(params=[1, 4])
def other_ranks(request):
    """One rank and four."""
    return request.param, request.getfixturevalue({1: "one_rank", 4: "four_ranks"}[request.param])
