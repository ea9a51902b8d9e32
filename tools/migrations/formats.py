"""How the pages in docs/migrations/ show things: tables, numbers, coefficients, and changes of loops as diffs."""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def found(name: str) -> Any:
    """Return what a migration came to."""
    return json.loads((HERE / name / "found.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  ", "| ") for cells in lines)


def number(value: float | None, digits: int = 4) -> str:
    """Return a number as a table shows it; - for none."""
    return "-" if value is None else f"{value:.{digits}g}"


def times(share: float) -> str:
    """Return a sum of coefficients, with the digits that a reader compares."""
    return f"{share:.3f}"


def entered(step: dict[str, Any]) -> float:
    """Return the sum of the coefficients with which micro-batches entered a step; 1 is right."""
    return sum(value for row in step["coefficients"] for value in row)


def worst(step: dict[str, Any]) -> str:
    """Return the coefficient of a step that is furthest from its right one, as a multiple of that."""
    ratios = [
        one / right
        for row, wanted in zip(step["coefficients"], step["expected"], strict=True)
        for one, right in zip(row, wanted, strict=True)
    ]
    return f"{max(ratios, key=lambda ratio: abs(ratio - 1)):.2f}"


def coefficients(step: dict[str, Any]) -> str:
    """Return the coefficients of a step by pass and rank, each beside what it should be."""
    ranks = range(len(step["expected"][0]))
    header = ["pass", *(f"rank {one}: entered with" for one in ranks), *(f"rank {one}: right" for one in ranks)]
    rows = [
        # What is 1e-7 was measured, and is a 0.
        [str(at), *(f"{round(one, 5) + 0.0:.5f}" for one in measured), *(f"{one:.5f}" for one in right)]
        for at, (measured, right) in enumerate(zip(step["coefficients"], step["expected"], strict=True))
    ]
    return table(header, rows)


def diff(name: str, function: str = "train", loops: tuple[str, str] = ("before", "after")) -> str:
    """Return the change of a migration's loop as a fenced diff."""
    old, new = (_source(HERE / name / f"{one}.py", function) for one in loops)
    files = [f"{one}.py" for one in loops]
    lines = difflib.unified_diff(old, new, *files, n=2, lineterm="")
    return "\n".join(["```diff", *lines, "```"]) + "\n"


def configuration(name: str, key: str = "ds_parity") -> str:
    """Return one key of a migration's configuration as it stands there."""
    config = json.loads((HERE / name / "ds_config.json").read_text())
    return f"```text\n{json.dumps({key: config[key]}, indent=2)}\n```\n"


def _source(path: Path, function: str) -> list[str]:
    text = path.read_text()
    (node,) = (one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef) and one.name == function)
    return (ast.get_source_segment(text, node) or "").splitlines()
