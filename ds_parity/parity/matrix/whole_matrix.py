"""`ds-parity verify --matrix`: choose cells, run them, judge them, write them down."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ds_parity.config.releases import read
from ds_parity.errors import ConfigError
from ds_parity.parity.matrix import pages
from ds_parity.parity.matrix.cell_runs import Progress, calls_of, run_cells
from ds_parity.parity.matrix.cells import Cell, cells
from ds_parity.parity.matrix.results import Result, equal, judge
from ds_parity.parity.matrix.summary import markdown, summary
from ds_parity.parity.matrix.variants import VARIANTS
from ds_parity.parity.running.one_at_a_time import alone_in


@dataclass(frozen=True)
class Matrix:
    """What the cells came to; `facts` say where and with what."""

    results: tuple[Result, ...]
    facts: dict[str, str]

    @property
    def equal(self) -> bool:
        """Whether there are cells, and each is right or refused as it should be."""
        return equal(self.results)


def chosen(subset: str | None) -> tuple[Cell, ...]:
    """Return the cells of a subset: None for all, `quick`, or a part of a group's or a row's name.

    Raises:
        ConfigError: there is no such cell.
    """
    if subset is None or subset == "quick":
        return cells(quick=subset == "quick")
    wanted = subset.lower()
    named = cells(v for v in VARIANTS if wanted in f"{v.group}: {v.name}".lower())
    if not named:
        groups = ", ".join(dict.fromkeys(variant.group for variant in VARIANTS))
        raise ConfigError(
            f"--matrix {subset!r} names no row of the matrix: give 'quick', one of the groups {groups}, a part of a "
            "row's name such as 'offload', or nothing for all"
        )
    return named


def calls(wanted: Sequence[Cell], folder: Path) -> int:
    """Return how many calls the ranks will run, for a progress bar."""
    return sum(len(calls_of(cell, folder)) for cell in wanted)


def verify(wanted: Sequence[Cell], folder: Path, progress: Progress = lambda done, title: None) -> Matrix:
    """Run the cells, and leave `matrix.html`, `matrix.md` and `matrix.json` in `folder` beside the traces.

    Raises:
        HarnessError: the ranks could not be started, or another process runs the matrix in `folder`.
    """
    folder = folder.resolve()
    begun = time.perf_counter()
    with alone_in(folder, "matrix"):
        answers = run_cells(wanted, folder, progress)
        here = read(version("deepspeed"))
        results = tuple(judge(cell, answers, folder, here) for cell in wanted)
    facts = _facts(answers) | {"took": f"{time.perf_counter() - begun:.0f} s"}
    matrix = Matrix(results, facts)
    pages.write(results, facts, folder / "matrix.html")
    made_with = ", ".join(f"{name} {facts[name]}" for name in ("deepspeed", "torch", "accelerator"))
    (folder / "matrix.md").write_text(markdown(results, made_with))
    (folder / "matrix.json").write_text(json.dumps(plain(matrix), indent=2) + "\n")
    return matrix


def plain(matrix: Matrix) -> dict[str, Any]:
    """Return the matrix as plain values, for machines."""
    return {
        "equal": matrix.equal,
        "summary": summary(matrix.results),
        "facts": matrix.facts,
        "cells": [_plain(result) for result in matrix.results],
    }


def _plain(result: Result) -> dict[str, Any]:
    variant = result.cell.variant
    return {
        "group": variant.group,
        "name": variant.name,
        "stage": result.cell.stage,
        "status": str(result.status),
        "seconds": round(result.seconds, 2),
        "findings": [{"check": f.check, "status": str(f.status), "detail": f.detail} for f in result.findings],
    }


def _facts(answers: dict[str, dict[str, Any]]) -> dict[str, str]:
    facts = {name: version(name) for name in ("ds_parity", "deepspeed", "torch")}
    accelerators = {answer["accelerator"] for answer in answers.values() if "accelerator" in answer}
    return facts | {"accelerator": max(accelerators, key=len, default="unknown")}  # the longest says how fp16 was run
