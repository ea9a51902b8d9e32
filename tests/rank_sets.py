"""Sets of ranks that test modules share: a module registers what its ranks run, and its tests read what came of it.

A process start takes 5 to 10 seconds and an engine 0.3, so one start of a set serves all test modules. A module
registers its calls while it is imported. Pytest imports all selected modules before it sets up the first fixture, so
the fixture that starts the ranks knows every call of the selected modules and no other: a file that is run alone runs
only its own calls.

    @on_two_ranks
    def boundaries(folder):
        ...  # on every rank; what the first rank returns travels back as JSON

    def test_where_boundaries_are(two_ranks):
        assert two_ranks.of(boundaries)["seen"] == [3, 7, 11]

Ranks import the test module to find the function. What a test module does on import must therefore be cheap, and must
not touch the accelerator or the process group.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from ds_parity.engine.internals.installed import installed
from ds_parity.errors import DsParityError, HarnessError
from ds_parity.parity.probe.decomposition import ProbeResult
from ds_parity.parity.running.functions import resolve
from ds_parity.parity.running.launch import Call, Job
from ds_parity.parity.verification.verify import call, title
from ds_parity.trace import read_trace
from tests.beside import Errand
from tests.older_refusals import is_older, refusal, skip_where_bare_is_wrong
from tests.starts import MOST_STARTS, run_in_parts

ROOT = str(Path(__file__).parents[1])
BARE = ("deepspeed-loop", "deepspeed")
CANDIDATE = "ds_parity.parity.subjects.candidate:run"
REFUSED = "refused on this release of DeepSpeed"
# A call that an older release can't run ends the ranks, and a set has some: each of them alone is to fail.
STARTS_ON_OLDER = 40


class RankSet:
    """What a set of ranks runs in one start; as a decorator it registers a task, a function of `folder`.

    The folder is a path of the task's own, in which nothing exists yet.

    Attributes:
        ranks: how many processes are started.
        goes_on: whether a task needs what an earlier set has left.
    """

    def __init__(self, ranks, **options):
        """Take the number of ranks, and options of `Job`."""
        self.ranks, self.goes_on = ranks, False
        self._options, self._registered = options, {}

    def __call__(self, task):
        """Register a task, and return it as it is."""
        self._register(_title(task), _name(task), lambda folder, _: _task(task, folder))
        return task

    def first(self, task):
        """Register a task that forks, to be run before all others.

        Engines of ZeRO 3 stay in memory for good (DeepSpeed 0.19.8), each with 2 GB of addresses that nothing touches.
        Linux refuses to fork a process whose addresses have grown beyond the machine's memory.
        """
        self(task)
        self._registered = {_title(task): self._registered.pop(_title(task)), **self._registered}
        return task

    def after(self, **tasks):
        """Return a decorator for a task that goes on from what tasks of an earlier set have left.

        Args:
            tasks: by the name of the argument that is given the folder of each.
        """

        def register(task):
            def make(folder, earlier):
                # Whether it was run well is for the task itself to find.
                left = {name: str(_folder(earlier, other)) for name, other in tasks.items()}
                return _task(task, folder, **left)

            self.goes_on = True
            self._register(_title(task), _name(task), make)
            return task

        return register

    def call(self, function, **arguments):
        """Register a function with plain arguments; several modules may ask for the same."""
        made = _call(function, **arguments)
        self._register(made.title, made, lambda *_: made)

    def train(self, scenario, *engines):
        """Register runs of a scenario, one with each engine, that leave traces; several modules may ask for one."""
        if scenario.processes != self.ranks:
            raise ValueError(f"{scenario.name} takes {scenario.processes} ranks, not {self.ranks}")
        for engine in engines:
            self._register(title(scenario, engine), scenario, lambda folder, _, by=engine: call(scenario, by, folder))

    def probe(self, scenario, subject=CANDIDATE):
        """Register a probe: the coefficients with which micro-batches enter the steps of a subject."""
        made = _probe(scenario, subject)
        self._register(made.title, made, lambda *_: made)

    def launch(self, folder, earlier=None):
        """Start the ranks, run what is registered, and return a Launched.

        Args:
            folder: for all that the ranks leave.
            earlier: the folder of the set from which tasks go on.
        """
        return self.launched(folder, run_in_parts(*self._started(folder, earlier)))

    def errand(self, folder, earlier=None):
        """Return the same as an errand, to be run beside the tests; `launched` makes a Launched of its result.

        None where nothing is registered.
        """
        return Errand("tests.starts:run_in_parts", self._started(folder, earlier)) if self._registered else None

    def launched(self, folder, results):
        """Return what the ranks have left, from the folder and the results of all that is registered."""
        return Launched(folder, dict(zip(self._registered, results, strict=True)))

    def _started(self, folder, earlier):
        """Return the job, and how often its ranks may be started."""
        older = is_older(installed())
        calls = tuple(make(folder, earlier) for _, make in self._registered.values())
        if older:
            calls = tuple(map(_refusable, calls))
        job = Job(calls, folder / "ranks", self.ranks, import_from=(ROOT,), **self._options)
        return job, STARTS_ON_OLDER if older else MOST_STARTS

    def _register(self, name, what, make):
        # Two scenarios of one name would leave their traces in one file.
        if self._registered.setdefault(name, (what, make))[0] != what:
            raise ValueError(f"{name} is registered already, and is something else there")


class Launched:
    """What a set of ranks has left: results, and traces in `folder`."""

    def __init__(self, folder, results):
        self.folder, self._results = folder, results

    def of(self, function, **arguments):
        """Return what a registered task, or a function that was registered with these arguments, returned.

        A test is skipped by it where an older DeepSpeed is installed and the table of releases refuses the call.
        """
        return self._result(_title(function, **arguments))

    def folder_of(self, task):
        """Return the folder that a registered task was given."""
        self.of(task)
        return _folder(self.folder, task)

    def trace(self, scenario, engine):
        """Return the trace of a registered run.

        A test is skipped where that of bare DeepSpeed is asked for, and the installed release is wrong.
        """
        if engine in BARE:
            skip_where_bare_is_wrong(scenario.config)
        self._result(title(scenario, engine))
        return read_trace(self.folder / scenario.name / f"{engine}.jsonl")

    def probed(self, scenario, subject=CANDIDATE):
        """Return what a registered probe measured."""
        return ProbeResult(**self._result(_probe(scenario, subject).title))

    def _result(self, name):
        if name not in self._results:
            raise LookupError(f"{name} was not run: register it in the test module that asserts on it")
        result = self._results[name]
        if isinstance(result, HarnessError):
            raise result
        if isinstance(result, dict) and REFUSED in result:
            pytest.skip(result[REFUSED])
        return result


def run_refusable(function, arguments):
    """Run a call on ranks of an older release; what the table of releases refuses in it is its result.

    Any other error ends the rank, and with it the start: the ranks that have not raised would wait for this one.
    """
    # Imported here: whoever registers calls needs no DeepSpeed.
    from ds_parity.engine.internals.older import buffer_without_graph, building

    with building():  # bare engines, too, are to wait for all weights that they gather
        pass
    try:
        # Without DeepSpeed's own later line (#7948), 0.18.6 to 0.18.10 raise in each bare step on ZeRO 1 and 2.
        with buffer_without_graph():
            return resolve(function)(**arguments)
    except DsParityError as error:
        why = refusal(error, installed())
        if why is None:
            raise
        return {REFUSED: why}


def _refusable(call):
    arguments = {"function": call.function, "arguments": call.arguments}
    return replace(call, function=f"{__name__}:{run_refusable.__name__}", arguments=arguments)


def _name(function):
    return f"{function.__module__}:{function.__qualname__}"


def _title(function, **arguments):
    given = ", ".join(f"{name}={value!r}" for name, value in sorted(arguments.items()))
    return f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}{given and f'({given})'}"


def _folder(folder, task):
    return folder / _title(task)


def _task(task, folder, **left):
    return Call(_title(task), _name(task), {"folder": str(_folder(folder, task)), **left})


def _call(function, **arguments):
    return Call(_title(function, **arguments), _name(function), arguments)


def _probe(scenario, subject):
    arguments = {"scenario": scenario.to_json(), "subject": subject}
    return Call(f"{scenario.name}: {subject}", "ds_parity.parity.probe.measure:probe_scenario", arguments)
