"""`ds-parity verify`: one configuration, run by the references and by ds_parity, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_parity.config import refuse_misspelt
from ds_parity.errors import ConfigError
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import Comparison, compare
from ds_parity.parity.diagnosis import Cause, diagnose
from ds_parity.parity.running.functions import refuse_unknown
from ds_parity.parity.running.launch import Call, Job, run_job
from ds_parity.parity.running.layouts import cut_by
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.side_effects import without_outputs
from ds_parity.trace import Trace, read_trace

Progress = Callable[[int, str], None]
# Ranks import these by name: the first ends the job where it raises, the second answers with the error.
_RUN_SCENARIO = "ds_parity.parity.running.tasks:run_scenario"
ATTEMPT_SCENARIO = "ds_parity.parity.running.tasks:attempt_scenario"
TIERS = {"deepspeed": Tier.EXACT, "deepspeed-loop": Tier.EXACT, "torch": Tier.REASSOCIATED}

# Losses for which bare DeepSpeed's mean over passes is another step.
_NOT_ALIKE = {
    "weight": "its mean over passes gives every micro-batch one weight, and here each brings its own",
    "divided": "it divides every loss by its number of passes, and here the caller has divided already",
    "terms": "its mean over passes is one denominator for all terms, and here each has its own",
}


@dataclass(frozen=True)
class Outcome:
    """One comparison of the engine under test with one reference."""

    scenario: Scenario
    reference: str
    comparison: Comparison
    candidate: Trace
    reference_trace: Trace
    causes: tuple[Cause, ...] = ()

    @property
    def title(self) -> str:
        """The scenario's name and the reference's."""
        return f"{self.scenario.name} against {self.reference}"


@dataclass(frozen=True)
class LeftOut:
    """A comparison that can't be made, and why."""

    scenario: str
    reference: str
    why: str

    def __str__(self) -> str:
        return f"{self.scenario} against {self.reference}: {self.why}"


@dataclass(frozen=True)
class Verification:
    """All outcomes.

    Attributes:
        outcomes: the comparisons.
        left_out: comparisons that could not be made.
        accelerator: what the engines ran on.
    """

    outcomes: tuple[Outcome, ...]
    left_out: tuple[LeftOut, ...]
    accelerator: str

    @property
    def equal(self) -> bool:
        """Whether there was something to compare, and all of it was equal."""
        return bool(self.outcomes) and all(outcome.comparison.equal for outcome in self.outcomes)


def scenarios(
    config: dict[str, Any], ranks: int, **options: Any
) -> tuple[list[tuple[Scenario, tuple[str, ...]]], list[LeftOut]]:
    """Return what `verify` runs for a configuration, with its references, and what it leaves out and why.

    Raises:
        ConfigError: the configuration can't be run at all, or nearly has a key of DeepSpeed's.
    """
    refuse_misspelt(config)
    config = without_outputs(config)
    ragged = Scenario("ragged", config, ranks, shape="overshoot", **options)
    ragged = replace(ragged, short=min(2, cut_by(ragged.settings).target - 1))
    ragged.layout()  # for its ConfigError, before any rank is started
    references = ("deepspeed-loop",) if ragged.train else ("deepspeed-loop", "torch")
    wanted: list[tuple[Scenario, tuple[str, ...]]] = [(ragged, references)]
    if ragged.train:
        why = "a training function drives an engine, and this reference has none of ds_parity's calls"
        return wanted, [LeftOut("ragged", "torch", why), LeftOut("uniform", "deepspeed", why)]
    weighed_by = "terms" if ragged.settings.terms else ragged.settings.loss_weight
    if weighed_by in _NOT_ALIKE:
        return wanted, [LeftOut("uniform", "deepspeed", _NOT_ALIKE[weighed_by])]
    uniform = Scenario("uniform", config, ranks, shape="uniform", **options)
    try:
        uniform.layout()
    except ConfigError as error:
        return wanted, [LeftOut("uniform", "deepspeed", str(error))]
    return [(uniform, ("deepspeed",)), *wanted], []


def title(scenario: Scenario, engine: str) -> str:
    """Return the title of the call that runs a scenario with an engine."""
    return f"{scenario.name}: {engine}"


def call(scenario: Scenario, engine: str, folder: Path) -> Call:
    """Return the call that leaves the trace of a scenario, as an engine runs it, in `folder`."""
    arguments = {"scenario": scenario.to_json(), "engine": engine, "folder": str(folder)}
    return Call(title(scenario, engine), _RUN_SCENARIO, arguments)


def calls(runs: list[tuple[Scenario, tuple[str, ...]]], folder: Path) -> tuple[Call, ...]:
    """Return the calls that leave the traces of `runs` in `folder`."""
    return tuple(
        call(scenario, engine, folder) for scenario, references in runs for engine in (*references, "ds_parity")
    )


def verify(
    config: dict[str, Any],
    folder: Path,
    *,
    ranks: int = 2,
    timeout: float = 600.0,
    progress: Progress = lambda done, title: None,
    import_from: tuple[str, ...] = (),
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
        options: of `Scenario` (windows, seed, model, rollouts, max_tokens, train).

    Raises:
        ConfigError: the configuration can't be run.
        HarnessError: a rank failed, or time ran out.
    """
    runs, left_out = scenarios(config, ranks, **options)
    for name in filter(None, (options.get("model"), options.get("train"))):
        refuse_unknown(name, import_from)
    folder = folder.resolve()
    ran = run_job(Job(calls(runs, folder), folder / "ranks", ranks, timeout, import_from=import_from), progress)
    return judge(runs, left_out, folder, ran[0]["accelerator"])


def judge(
    runs: Iterable[tuple[Scenario, tuple[str, ...]]], left_out: Iterable[LeftOut], folder: Path, accelerator: str
) -> Verification:
    """Compare the traces that lie in `folder` once the ranks have run.

    Raises:
        TraceError: one of them is missing or can't be read.
    """
    outcomes = (outcome(scenario, reference, folder) for scenario, references in runs for reference in references)
    return Verification(tuple(outcomes), tuple(left_out), accelerator)


def outcome(scenario: Scenario, reference: str, folder: Path, candidate: str = "ds_parity") -> Outcome:
    """Compare two traces of a scenario that lie in `folder`."""
    traces = [read_trace(folder / scenario.name / f"{engine}.jsonl") for engine in (reference, candidate)]
    comparison = compare(traces[0], traces[1], TIERS[reference], scenario.dtype)
    causes = diagnose(traces[0], traces[1], comparison)
    return Outcome(scenario, reference, comparison, traces[1], traces[0], causes)
