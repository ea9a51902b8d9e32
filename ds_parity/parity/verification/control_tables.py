"""What the controls came to, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ds_parity.parity.subjects.controls.known import WITHOUT_TRACE
from ds_parity.parity.verification.control_margins import margins, signal
from ds_parity.parity.verification.control_runs import ControlFinding


def render(findings: Sequence[ControlFinding]) -> Table:
    """Return a table with one row per engine: at which step and by what it was caught, and what it was taken for."""
    table = Table(title="controls: engines with one fault each, against the torch reference")
    for name in ("engine", "scenario", "result", "by", "bounds off", "diagnosed as"):
        table.add_column(name, justify="right" if name == "bounds off" else "left")
    for finding in findings:
        table.add_row(*_cells(finding), style=None if finding.good else "bold red")
    return table


def summary(findings: Sequence[ControlFinding]) -> str:
    """Return how many were caught and named, how many clean runs there were, and the margin."""
    faults = [finding for finding in findings if not finding.clean]
    clean = [finding for finding in findings if finding.clean]
    caught, named = sum(finding.caught for finding in faults), sum(finding.named for finding in faults)
    listed = sum(finding.listed for finding in faults)
    alarms = sum(not finding.good for finding in clean)
    caught_and_alarms = (
        f"{caught} of {len(faults)} faults caught, {named} named, {listed} unknown and among those "
        f"not excluded; "
        f"{alarms} false alarms in {len(clean)} clean runs"
    )
    times_noise = ", ".join(f"{times:,.0f} in {name}" for name, times in margins(findings).items())
    if not times_noise:
        return caught_and_alarms
    return f"{caught_and_alarms}; the weakest signal over the greatest noise: {times_noise}"


def notes() -> list[str]:
    """Return what can't be run, and why."""
    return [f"{name}: {why}" for name, why in WITHOUT_TRACE.items()]


def plain(findings: Sequence[ControlFinding]) -> list[dict[str, Any]]:
    """Return the findings as plain values."""
    return [
        {
            "engine": finding.name,
            "scenario": finding.scenario,
            "clean": finding.clean,
            "caught": finding.caught,
            "step": finding.comparison.first.step if finding.comparison and finding.comparison.first else None,
            "field": finding.comparison.first.field if finding.comparison and finding.comparison.first else None,
            "signal": strongest.bounds if (strongest := signal(finding)) else None,
            "raised": finding.raised,
            **finding.diagnosis.plain(),
        }
        for finding in findings
    ]


def _cells(finding: ControlFinding) -> tuple[str, ...]:
    first = finding.comparison.first if finding.comparison else None
    if finding.raised is not None:
        result, by = "raised", finding.raised.splitlines()[0][:60]
    elif first is None:
        result, by = ("equal", "") if finding.clean else ("MISSED", "")
    else:
        result = ("FALSE ALARM" if finding.clean else "caught") + (f" at step {first.step}" if first.step else "")
        by = first.field
    strongest = None if finding.clean else signal(finding)
    cause = _diagnosed(finding)
    return finding.name, finding.scenario, result, by, f"{strongest.bounds:,.0f}" if strongest else "", cause


def _diagnosed(finding: ControlFinding) -> str:
    if finding.clean or not finding.caught:
        return ""
    names = [cause.name for cause in finding.diagnosis.causes]
    if finding.named:
        return finding.name if finding.name in names else f"{names[0]} (alike)"
    if names:
        return f"{names[0]} (wrong)"
    return f"unknown: {', '.join(finding.diagnosis.classes)}" + (" (not excluded)" if finding.listed else "")
