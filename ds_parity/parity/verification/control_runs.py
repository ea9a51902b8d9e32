"""Run the controls over one configuration: each must be caught, and the clean engines must not be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_parity.config.features import Wanted
from ds_parity.errors import ConfigError
from ds_parity.parity.comparison.fields import Comparison
from ds_parity.parity.diagnosis import NOTHING, Diagnosis, grouped
from ds_parity.parity.running.launch import Job, run_job
from ds_parity.parity.running.one_at_a_time import alone_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.controls.known import known
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.verification.control_scenarios import scenario
from ds_parity.parity.verification.verify import ATTEMPT_SCENARIO, Progress, call, outcome, title

RANKS = 2
CLEAN = ("ds_parity", "clean")


@dataclass(frozen=True)
class ControlFinding:
    """What came of one engine in one scenario.

    Attributes:
        name: of the control, or of a clean engine.
        scenario: what it ran.
        comparison: with the torch reference; None where it raised.
        diagnosis: what is known of the difference.
        raised: what it raised in place of a trace.
    """

    name: str
    scenario: str
    comparison: Comparison | None
    diagnosis: Diagnosis = NOTHING
    raised: str | None = None

    @property
    def clean(self) -> bool:
        """Whether the engine has no fault."""
        return self.name in CLEAN

    @property
    def caught(self) -> bool:
        """Whether a difference was found."""
        return self.raised is not None or (self.comparison is not None and not self.comparison.equal)

    @property
    def good(self) -> bool:
        """Whether the harness did its duty: a fault is caught, a clean engine is not."""
        return self.caught != self.clean and not (self.clean and self.raised)

    @property
    def named(self) -> bool:
        """Whether the first cause, or the group of those that the record can't tell apart, has the fault in it.

        One whose traces look the same counts as the fault.
        """
        first = {cause.name for group in grouped(self.diagnosis.causes)[:1] for cause in group}
        return bool(first & {self.name, *known()[self.name].like})

    @property
    def listed(self) -> bool:
        """Whether the cause is said to be unknown, and the fault is among those that the record doesn't exclude."""
        return not self.diagnosis.causes and self.name in self.diagnosis.not_excluded


def chosen(names: Iterable[str] | None, stage: int) -> tuple[type[Loop], ...]:
    """Return the controls of these names that are faults on a ZeRO stage; None for all.

    Raises:
        ConfigError: there is no such control.
    """
    every = known()
    for name in names or ():
        if name not in every:
            raise ConfigError(f"control {name!r}: it must be one of {', '.join(every)}")
    return tuple(c for name, c in every.items() if stage in c.stages and (names is None or name in names))


def planned_runs(config: dict[str, Any], names: Iterable[str] | None = None) -> list[tuple[Scenario, str]]:
    """Return what to run: every scenario with the reference and the clean engines, and each control in its own.

    Raises:
        ConfigError: a name is unknown.
    """
    wanted = chosen(names, Wanted(config).stage or 0)
    shapes = {name: scenario(name, config) for name in dict.fromkeys(control.scenario for control in wanted)}
    engines = [(shape, engine) for shape in shapes.values() for engine in ("torch", *CLEAN)]
    return [*engines, *((shapes[control.scenario], control.name) for control in wanted)]


def run_controls(
    config: dict[str, Any],
    folder: Path,
    *,
    names: Iterable[str] | None = None,
    timeout: float = 900.0,
    progress: Progress = lambda done, title: None,
) -> tuple[ControlFinding, ...]:
    """Run controls and clean engines on two ranks, and compare all with the torch reference.

    Args:
        config: extended configuration, of which ZeRO, offload and precision are taken.
        folder: for traces and the ranks' log.
        names: of controls, None: all that are faults on its ZeRO stage.
        timeout: seconds for all of it.
        progress: called with the number of runs that have finished, and the title of the one under way.

    Raises:
        ConfigError: a name is unknown, or the configuration can't be run.
        HarnessError: ranks died, hung, or time ran out, or another process runs controls in `folder`.
    """
    folder = folder.resolve()
    wanted = planned_runs(config, names)
    calls = tuple(
        replace(call(shape, engine, folder, hypotheses=True), function=ATTEMPT_SCENARIO) for shape, engine in wanted
    )
    with alone_in(folder, "controls"):
        answers = run_job(Job(calls, folder / "ranks", RANKS, timeout), progress)
        raised = {one.title: answer.get("raised") for one, answer in zip(calls, answers, strict=True)}
        subjects = [(shape, engine) for shape, engine in wanted if engine != "torch"]
        return tuple(_finding(shape, engine, folder, raised[title(shape, engine)]) for shape, engine in subjects)


def good(findings: Sequence[ControlFinding]) -> bool:
    """Whether there are controls, all were caught, and no clean engine was."""
    return any(not one.clean for one in findings) and all(one.good for one in findings)


def _finding(shape: Scenario, engine: str, folder: Path, raised: str | None) -> ControlFinding:
    if raised is not None:
        return ControlFinding(engine, shape.name, None, raised=raised)
    compared = outcome(shape, "torch", folder, engine)
    return ControlFinding(engine, shape.name, compared.comparison, compared.diagnosis)
