"""What `ds-parity compare` and `ds-parity verify` found, as a report's contents."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_parity.config import rewrite
from ds_parity.parity.comparison.compare import Comparison
from ds_parity.parity.diagnosis import NOTHING, Diagnosis
from ds_parity.parity.report.contents import Compared, Configurations, Contents, Side

if TYPE_CHECKING:
    from ds_parity.parity.verification.verify import Outcome, Verification


def of_traces(
    comparison: Comparison,
    reference: Side,
    candidate: Side,
    diagnosis: Diagnosis = NOTHING,
    made: datetime | None = None,
) -> Contents:
    """Return the contents for two traces.

    Args:
        comparison: what comparing them found.
        reference: the trace that is right.
        candidate: the trace in question; its scenario names the comparison, or its path if it has none.
        diagnosis: what is known of the difference.
        made: when, in UTC; now by default.
    """
    scenario = candidate.trace.header.scenario or candidate.path
    compared = Compared(scenario, reference.path, comparison, reference, candidate, diagnosis)
    return Contents((compared,), made or _now())


def of_verification(
    verified: Verification, config: Mapping[str, Any], ranks: int, folder: Path, made: datetime | None = None
) -> Contents:
    """Return the contents for a verification.

    Args:
        verified: what the runs came to.
        config: the extended configuration that was verified.
        ranks: that ran it.
        folder: where the traces lie.
        made: when, in UTC; now by default.

    Raises:
        ConfigError: the configuration can't be rewritten.
    """
    rewritten = rewrite(config, ranks)
    return Contents(
        compared=tuple(_compared(outcome, folder) for outcome in verified.outcomes),
        made=made or _now(),
        left_out=verified.left_out,
        configurations=Configurations(config, rewritten.config, rewritten.changes),
        facts={"ran on": verified.accelerator},
    )


def _compared(outcome: Outcome, folder: Path) -> Compared:
    name = outcome.scenario.name

    def path(engine: str) -> str:
        return str(folder / name / f"{engine}.jsonl")

    return Compared(
        scenario=name,
        against=outcome.reference,
        comparison=outcome.comparison,
        reference=Side(outcome.reference_trace, path(outcome.reference)),
        candidate=Side(outcome.candidate, path(outcome.candidate.header.engine)),
        diagnosis=outcome.diagnosis,
    )


def _now() -> datetime:
    return datetime.now(UTC)
