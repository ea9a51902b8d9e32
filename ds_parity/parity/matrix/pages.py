"""The matrix as one HTML file that opens from the disk and needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ds_parity.parity.matrix.results import Result, equal
from ds_parity.parity.matrix.summary import notes, rows, summary
from ds_parity.parity.matrix.variants import STAGES


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
        summary=summary(results),
        good=equal(results),
        facts=facts,
        stages=STAGES,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
