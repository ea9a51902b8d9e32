"""`ds-parity verify`: one configuration, run by the references and by ds_parity, and compared."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_parity.errors import ConfigError, HarnessError
from ds_parity.parity.comparison.compare import Comparison, compare
from ds_parity.parity.diagnosis import NOTHING, Diagnosis, diagnose
from ds_parity.parity.running.functions import refuse_unknown
from ds_parity.parity.running.launch import Call, Job, run_job
from ds_parity.parity.running.one_at_a_time import alone_in
from ds_parity.parity.running.policies import refuse_unknown_model
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.verification.compared_with import BARE, TIERS, LeftOut, of_bare, scenarios
from ds_parity.parity.verification.sentence import found
from ds_parity.trace import Trace, read_trace

__all__ = [
    "ATTEMPT_SCENARIO",
    "TIERS",
    "LeftOut",
    "Outcome",
    "Verification",
    "call",
    "calls",
    "judge",
    "of_bare",
    "outcome",
    "scenarios",
    "title",
    "verify",
]

Progress = Callable[[int, str], None]
# Ranks import these by name: the first ends the job where it raises, the second answers with the error.
_INSPECT_AND_RUN = "ds_parity.parity.running.tasks:inspect_and_run"
_RUN_SCENARIO = "ds_parity.parity.running.tasks:run_scenario"
# As run_job begins what it says.
_OF_REFERENCE = re.compile(r"rank \d+ failed in '\w+: deepspeed(-loop)?': (?!ConfigError)")
ATTEMPT_SCENARIO = "ds_parity.parity.running.tasks:attempt_scenario"


@dataclass(frozen=True)
class Outcome:
    """One comparison of the engine under test with one reference."""

    scenario: Scenario
    reference: str
    comparison: Comparison
    candidate: Trace
    reference_trace: Trace
    diagnosis: Diagnosis = NOTHING

    @property
    def title(self) -> str:
        """The scenario's name and the reference's."""
        return f"{self.scenario.name} against {self.reference}"


@dataclass(frozen=True)
class Verification:
    """All outcomes.

    Attributes:
        outcomes: the comparisons.
        left_out: comparisons that could not be made.
        accelerator: what the engines ran on.
        bare: bare DeepSpeed was judged, and not ds_parity.
    """

    outcomes: tuple[Outcome, ...]
    left_out: tuple[LeftOut, ...]
    accelerator: str
    bare: bool = False

    @property
    def equal(self) -> bool:
        """Whether there was something to compare, and all of it was equal."""
        return bool(self.outcomes) and all(outcome.comparison.equal for outcome in self.outcomes)

    @property
    def sentence(self) -> str:
        """What was found, and where a training function ran on both sides, what was judged by that."""
        little = dict.fromkeys(why for outcome in self.outcomes for why in outcome.comparison.proves_little)
        said = found(self.outcomes, self.equal, self.bare)
        return said + (f", but this proves little: {'; '.join(little)}" if self.equal and little else "")


def title(scenario: Scenario, engine: str) -> str:
    """Return the title of the call that runs a scenario with an engine."""
    return f"{scenario.name}: {engine}"


def call(scenario: Scenario, engine: str, folder: Path, *, hypotheses: bool = False) -> Call:
    """Return the call that leaves the trace of a scenario, as an engine runs it, in `folder`.

    Args:
        scenario: what is run.
        engine: by its name.
        folder: for traces.
        hypotheses: whether the torch reference computes what known faults would make of each step, which takes about as
            long as its run.
    """
    arguments = {
        "scenario": scenario.to_json(), "engine": engine, "folder": str(folder), "hypotheses": hypotheses
    }  # fmt: skip
    return Call(title(scenario, engine), _RUN_SCENARIO, arguments)


def calls(runs: list[tuple[Scenario, tuple[str, ...]]], folder: Path, *, bare: bool = False) -> tuple[Call, ...]:
    """Return the calls that leave the traces of `runs` in `folder`."""
    return tuple(
        call(scenario, engine, folder)
        for scenario, references in runs
        for engine in (*references, candidate_of(scenario, bare))
    )


def candidate_of(scenario: Scenario, bare: bool) -> str:
    """Return the name of the engine under test of a scenario."""
    return BARE[scenario.name] if bare else "ds_parity"


def verify(
    config: dict[str, Any],
    folder: Path,
    *,
    ranks: int = 2,
    timeout: float = 600.0,
    progress: Progress = lambda done, title: None,
    import_from: tuple[str, ...] = (),
    bare: bool = False,
    **options: Any,
) -> Verification:
    """Run the references and the engine under test, and compare their traces, which stay in `folder`.

    Args:
        config: extended configuration.
        folder: for traces and the ranks' log.
        ranks: processes to start.
        timeout: seconds for all of it.
        progress: called with the number of runs that have finished, and the title of the one under way.
        import_from: folders in which ranks look up functions beside the installed packages.
        bare: judge bare DeepSpeed, driven by hand and by its own fixed accumulation, against plain torch. It needs
            nothing of ds_parity's engine, and so any DeepSpeed from 0.16 on.
        options: `against` (see `scenarios`), and those of `Scenario` (windows, seed, model, rollouts, tokenizer,
            max_tokens, train).

    Raises:
        ConfigError: the configuration can't be run.
        HarnessError: a rank failed, such as over a model that can't be compared, or time ran out, or another process
            verifies in `folder`.
    """
    if isinstance(options.get("against"), str):
        options["against"] = (options["against"],)
    if bare and tuple(options.pop("against", ()) or ("torch",)) != ("torch",):
        raise ConfigError("bare DeepSpeed is judged against torch alone: leave against (--against) out")
    runs, left_out = (of_bare if bare else scenarios)(config, ranks, **options)
    scenario = runs[-1][0]
    refuse_unknown_model(scenario.model, import_from)
    if scenario.train is not None:
        refuse_unknown(scenario.train, import_from)
    folder = Path(folder).resolve()
    every = calls(runs, folder, bare=bare)
    # On whole windows a training function has no other ranks: what it divides by their number is another step there.
    whole = tuple(one for one in every if scenario.train and one.arguments["engine"] == "torch")
    first, *others = (one for one in every if one not in whole)
    # The model is looked at before anything trains: plain torch computes a window in one batch.
    in_one = scenario.train is None and any("torch" in named for _, named in runs)
    look = replace(first, function=_INSPECT_AND_RUN, arguments={**first.arguments, "in_one": in_one})
    steps = (look, *others)
    with alone_in(folder, "verify"):
        end = time.monotonic() + timeout
        with _naming_the_reference():
            ran = run_job(Job(steps, folder / "ranks", ranks, timeout, import_from=import_from), progress)
        if whole:
            left = max(1.0, end - time.monotonic())
            job = Job(whole, folder / "whole_windows", 1, left, import_from=import_from)
            run_job(job, lambda done, title: progress(len(steps) + done, title))
        verified = judge(runs, left_out, folder, ran[0]["accelerator"], bare=bare)
        # What known faults would make of the steps is computed where there is a difference to explain.
        differ = [
            one
            for one in verified.outcomes
            if one.reference == "torch" and not one.comparison.equal and not one.scenario.train
        ]
        if differ:
            again = tuple(call(one.scenario, "torch", folder, hypotheses=True) for one in differ)
            job = Job(again, folder / "explaining", ranks, timeout, import_from=import_from)
            # It writes the traces of plain torch anew, and the verdict stands whatever becomes of that.
            try:
                with _restoring(_trace(one.scenario, one.reference, folder) for one in differ):
                    run_job(job)
            except HarnessError as error:
                unknown = LeftOut(differ[0].scenario.name, "known faults", f"they can't be computed: {error}")
                return replace(verified, left_out=(*verified.left_out, unknown))
            verified = judge(runs, left_out, folder, verified.accelerator, bare=bare)
    return verified


@contextmanager
def _restoring(paths: Iterable[Path]) -> Iterator[None]:
    """Return a context that leaves files as they were where the ranks inside it fail."""
    kept = {path: path.read_bytes() for path in paths}
    try:
        yield
    except HarnessError:
        for path, text in kept.items():
            path.write_bytes(text)
        raise


@contextmanager
def _naming_the_reference() -> Iterator[None]:
    """Return a context in which an error of bare DeepSpeed, where it is a reference, is called so."""
    try:
        yield
    except HarnessError as error:
        if _OF_REFERENCE.match(str(error)):
            raise HarnessError(
                f"{error}. This reference is bare DeepSpeed: where it can't train what ds_parity can, give --against "
                "torch"
            ) from error
        raise


def judge(
    runs: Iterable[tuple[Scenario, tuple[str, ...]]],
    left_out: Iterable[LeftOut],
    folder: Path,
    accelerator: str,
    *,
    bare: bool = False,
) -> Verification:
    """Compare the traces that lie in `folder` once the ranks have run.

    Raises:
        TraceError: one of them is missing or can't be read.
    """
    outcomes = (
        outcome(scenario, reference, folder, candidate_of(scenario, bare))
        for scenario, references in runs
        for reference in references
    )
    return Verification(tuple(outcomes), tuple(left_out), accelerator, bare)


def outcome(scenario: Scenario, reference: str, folder: Path, candidate: str = "ds_parity") -> Outcome:
    """Compare two traces of a scenario that lie in `folder`."""
    traces = [read_trace(_trace(scenario, engine, folder)) for engine in (reference, candidate)]
    comparison = compare(traces[0], traces[1], TIERS[reference], scenario.dtype)
    diagnosis = diagnose(traces[0], traces[1], comparison)
    return Outcome(scenario, reference, comparison, traces[1], traces[0], diagnosis)


def _trace(scenario: Scenario, engine: str, folder: Path) -> Path:
    return folder / scenario.name / f"{engine}.jsonl"
