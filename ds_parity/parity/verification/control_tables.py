"""What the controls came to, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ds_parity.parity.subjects.controls.known import WITHOUT_TRACE
from ds_parity.parity.verification.control_margins import margins, signal
from ds_parity.parity.verification.control_runs import Finding


def render(findings: Sequence[Finding]) -> Table:
    """One line an engine: caught at which step and by what, and what it was taken for."""
    table = Table(title="controls: engines with one fault each, against the torch reference")
    for name in ("engine", "scenario", "result", "by", "bounds off", "diagnosed as"):
        table.add_column(name, justify="right" if name == "bounds off" else "left")
    for found in findings:
        table.add_row(*_cells(found), style=None if found.good else "bold red")
    return table


def summary(findings: Sequence[Finding]) -> str:
    """Return how many were caught and named, how many clean runs there were, and the margin."""
    faults = [found for found in findings if not found.clean]
    clean = [found for found in findings if found.clean]
    caught, named = sum(found.caught for found in faults), sum(found.named for found in faults)
    alarms = sum(not found.good for found in clean)
    told = f"{caught} of {len(faults)} faults caught, {named} named first; {alarms} false alarms in {len(clean)} clean runs"
    found = ", ".join(f"{times:,.0f} in {name}" for name, times in margins(findings).items())
    return f"{told}; the weakest signal over the greatest noise: {found}" if found else told


def notes() -> list[str]:
    """Return what can't be run, and why."""
    return [f"{name}: {why}" for name, why in WITHOUT_TRACE.items()]


def plain(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the findings as plain values."""
    return [
        {
            "engine": found.name,
            "scenario": found.scenario,
            "clean": found.clean,
            "caught": found.caught,
            "step": found.comparison.first.step if found.comparison and found.comparison.first else None,
            "field": found.comparison.first.field if found.comparison and found.comparison.first else None,
            "signal": strongest.bounds if (strongest := signal(found)) else None,
            "raised": found.raised,
            "causes": [{"name": c.name, "likelihood": c.likelihood, "evidence": c.evidence} for c in found.causes],
        }
        for found in findings
    ]


def _cells(found: Finding) -> tuple[str, ...]:
    first = found.comparison.first if found.comparison else None
    if found.raised is not None:
        result, by = "raised", found.raised.splitlines()[0][:60]
    elif first is None:
        result, by = ("equal", "") if found.clean else ("MISSED", "")
    else:
        result = ("FALSE ALARM" if found.clean else "caught") + (f" at step {first.step}" if first.step else "")
        by = first.field
    strongest = None if found.clean else signal(found)
    cause = found.causes[0].name if found.causes else ""
    if cause and not found.clean and cause != found.name:
        cause += " (alike)" if found.named else " (wrong)"
    return found.name, found.scenario, result, by, f"{strongest.bounds:,.0f}" if strongest else "", cause
