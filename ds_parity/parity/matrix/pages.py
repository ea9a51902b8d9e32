"""The matrix as one HTML file that opens from the disk and needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ds_parity.parity.matrix.results import Result, Status, equal
from ds_parity.parity.matrix.summary import notes, rows
from ds_parity.parity.matrix.variant import STAGES
from ds_parity.parity.report.terminal import number

MEANINGS = {
    Status.RIGHT: "loss, learning rate, gradient norm and weights of each step are those of the references.",
    Status.CORRECTED: "DeepSpeed itself is wrong with this configuration, and ds_parity is right.",
    Status.REFUSED: "ds_parity raises an error for this configuration, which gives the reason.",
    Status.NOT_RUN: "a package that it needs is missing here; the note says which.",
    Status.DIFFERS: "a step of ds_parity is not equal to that of a reference.",
    Status.FAILED: "a run raised an error, or did not come to an end.",
}
_SAID = {
    Status.RIGHT: ("is right", "are right"),
    Status.CORRECTED: ("is corrected", "are corrected"),
    Status.REFUSED: ("is refused with the reason", "are refused with the reason"),
    Status.NOT_RUN: ("was not run", "were not run"),
    Status.DIFFERS: ("differs", "differ"),
    Status.FAILED: ("failed", "failed"),
}


def write(results: Sequence[Result], facts: Mapping[str, str], path: Path) -> None:
    """Write the report.

    Args:
        results: in the order of the matrix.
        facts: name to value, shown under the verdict: versions, device, seconds.
        path: of the file; its folder is made.
    """
    environment = Environment(
        loader=PackageLoader("ds_parity.parity.matrix", "."), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
        groups=[(group, list(members)) for group, members in groupby(rows(results), key=lambda row: row.group)],
        notes=notes(results),
        verdict=f"{'PASS' if equal(results) else 'FAIL'}: {in_words(results)}",
        good=equal(results),
        bad=[result for result in results if not result.good],
        facts=facts,
        stages=STAGES,
        meanings=MEANINGS,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def in_words(results: Sequence[Result]) -> str:
    """Return how many configurations came to what: `of 3 configurations, 2 are right and 1 failed`."""
    counts = {status: sum(result.status is status for result in results) for status in _SAID}
    parts = [f"{count} {_SAID[status][count != 1]}" for status, count in counts.items() if count]
    joined = " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
    return f"of {number(len(results), 'configuration')}, {joined}" if results else "nothing was run"
