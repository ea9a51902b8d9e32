"""The curves of a run as parts of an SVG: small panels under each other, wide enough for a phone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_parity.trace import read_trace

Series = Sequence[float]
COLUMNS = {
    "reward": "reward (mean over the rollouts of a window)",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "lag": "lag of a rollout in windows",
    "rollouts": "rollouts in a step",
    "passes": "passes in a step",
}
_LEFT, _WIDTH, _HEIGHT, _STEP = 76, 380, 62, 104


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        values: from left to right.
        ink: name of its colour.
        low: of the band around it, None without one.
        high: likewise.
    """

    values: Series
    ink: str
    low: Series | None = None
    high: Series | None = None


def columns(trace: Path, width: int = 10) -> dict[str, list[float]]:
    """Return what is drawn of a trace: means over `width` windows each, by the names in COLUMNS."""
    steps = read_trace(trace).steps
    found: dict[str, list[float]] = {}
    for name in COLUMNS:
        values = [float(_value(one, name)) for one in steps]
        found[name] = [
            round(statistics.fmean(values[at : at + width]), 6) for at in range(0, len(values) - width + 1, width)
        ]
    return found


def _value(step: Any, name: str) -> float:
    if name in step.metrics:
        return step.metrics[name]  # type: ignore[no-any-return]
    value = getattr(step, name)
    return value[0] if name == "lr" else value  # type: ignore[no-any-return]


def panel(
    sheet: Any,
    top: float,
    title: str,
    lines: Sequence[Line],
    *,
    ends: tuple[float, float] | None = None,
    height: float = _HEIGHT,
) -> None:
    """Draw one panel: its title above it, the least and the greatest value beside it.

    Args:
        sheet: to draw on.
        top: where the title stands.
        title: what is drawn.
        lines: of one length each.
        ends: of the axis; None: those of the values.
        height: of the axis.
    """
    everything = [value for line in lines for part in (line.values, line.low, line.high) for value in part or ()]
    low, high = ends or (min(everything), max(everything))
    if high - low < 1e-12:
        low, high = low - abs(low) / 2 - 1e-9, high + abs(high) / 2 + 1e-9
    foot = top + 14 + height
    sheet.text(12, top, title, 14, bold=True)
    sheet.line((_LEFT, foot), (_LEFT + _WIDTH, foot))
    sheet.text(_LEFT - 8, top + 28, _short(high), 14, ink="muted", anchor="end")
    sheet.text(_LEFT - 8, foot, _short(low), 14, ink="muted", anchor="end")

    def points(values: Series) -> list[tuple[float, float]]:
        across = max(len(values) - 1, 1)
        return [
            (round(_LEFT + _WIDTH * at / across, 1), round(foot - height * (value - low) / (high - low), 1))
            for at, value in enumerate(values)
        ]

    for line in lines:
        if line.low is not None and line.high is not None:
            _band(sheet, [*points(line.low), *reversed(points(line.high))], line.ink)
        sheet.line(*points(line.values), ink=line.ink, width=2)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def _band(sheet: Any, points: Sequence[tuple[float, float]], ink: str) -> None:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    sheet.parts.append(f'<polygon points="{path}" fill="{sheet.colours[ink]}" fill-opacity="0.2"/>')


def of_one(sheet: Any, found: Mapping[str, Series], steps: int, said: str) -> str:
    """Draw one run, a panel for each column; returns the SVG.

    Args:
        sheet: to draw on.
        found: what `columns` returned.
        steps: optimizer steps from left to right.
        said: one line below the title.
    """
    sheet.text(240, 32, "One run of train_online.py", 20, anchor="middle", bold=True)
    sheet.text(240, 56, said, 14, ink="muted", anchor="middle")
    top = 88.0
    for name, title in COLUMNS.items():
        ends = (0.0, 1.0) if name == "reward" else None
        panel(sheet, top, title, [Line(found[name], "good" if name == "reward" else "rank0 edge")], ends=ends)
        top += _STEP
    sheet.text(_LEFT, top - 4, "step 1", 14, ink="muted")
    sheet.text(_LEFT + _WIDTH, top - 4, f"step {steps}", 14, ink="muted", anchor="end")
    ends_of = ", ".join(f"{name} {found[name][0]:.3g} to {found[name][-1]:.3g}" for name in COLUMNS)
    return sheet.svg(top + 14, "One run of train_online.py", f"From the first to the last windows: {ends_of}.")
