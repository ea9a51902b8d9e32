"""The matrix for people: a table in the terminal, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from ds_parity.parity.matrix.results import Result, Status
from ds_parity.parity.matrix.variant import STAGES

ABSENT = "-"
_STYLES = {
    Status.RIGHT: "green",
    Status.CORRECTED: "cyan",
    Status.REFUSED: "yellow",
    Status.LEFT_OUT: "dim",
    Status.DIFFERS: "bold red",
    Status.FAILED: "bold red",
}


@dataclass(frozen=True)
class MatrixRow:
    """A variant: what its cells came to, by ZeRO stage."""

    group: str
    name: str
    cells: dict[int, Result]


def rows(results: Sequence[Result]) -> list[MatrixRow]:
    """Gather the cells of a variant, in the order of the matrix."""
    by_variant = []
    for (group, name), members in groupby(
        results, key=lambda result: (result.cell.variant.group, result.cell.variant.name)
    ):
        by_variant.append(MatrixRow(group, name, {result.cell.stage: result for result in members}))
    return by_variant


def notes(results: Sequence[Result]) -> list[str]:
    """Return why cells are not simply right, each reason once, in the order in which it is met."""
    return list(dict.fromkeys(result.why for result in results if result.status is not Status.RIGHT))


def render(results: Sequence[Result]) -> Table:
    """Return a table with one row per variant and one column per ZeRO stage; numbers point to the notes."""
    table = Table(title="ds_parity against its references, by configuration and ZeRO stage")
    table.add_column("configuration")
    for stage in STAGES:
        table.add_column(f"ZeRO {stage}", justify="center")
    known = notes(results)
    for _, members in groupby(rows(results), key=lambda row: row.group):
        group = list(members)
        table.add_row(f"[bold]{group[0].group}[/bold]")
        for row in group:
            cells = (row.cells.get(stage) for stage in STAGES)
            table.add_row(f"  {row.name}", *[_styled(cell, known) for cell in cells])
        table.add_section()
    return table


def markdown(results: Sequence[Result], versions: str) -> str:
    """Return the table for docs/matrix.md, with its notes and what it was made with."""
    known = notes(results)
    lines = [f"{summary(results)} ({versions}).", "", f"| | {' | '.join(f'ZeRO {stage}' for stage in STAGES)} |"]
    lines.append("|---" * (1 + len(STAGES)) + "|")
    for _, members in groupby(rows(results), key=lambda row: row.group):
        group = list(members)
        lines.append(f"| **{group[0].group}** |" + " |" * len(STAGES))
        for row in group:
            cells = " | ".join(_text(row.cells.get(stage), known) for stage in STAGES)
            lines.append(f"| {row.name} | {cells} |")
    lines += ["", *[f"{number}. {note}" for number, note in enumerate(known, start=1)]]
    return "\n".join(lines) + "\n"


def summary(results: Sequence[Result]) -> str:
    """Return how many cells have which status, in words."""
    counts = {status: sum(result.status is status for result in results) for status in _STYLES}
    in_words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(results)} cells: {in_words}"


def _text(result: Result | None, known: Sequence[str]) -> str:
    if result is None:
        return ABSENT
    if result.status is Status.RIGHT:
        return str(result.status)
    return f"{result.status} [{known.index(result.why) + 1}]"


def _styled(result: Result | None, known: Sequence[str]) -> str:
    text = _text(result, known).replace("[", "\\[")
    return text if result is None else f"[{_STYLES[result.status]}]{text}[/]"
