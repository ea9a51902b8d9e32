"""The pictures of a comparison as values, from which the page draws plots that can be read step by step.

A chart is a dictionary that becomes JSON: `title`, and either `said`, a sentence that says all there is to see, or `x`
(steps) and `series` (each with `label`, `role` and `y`, None where there is no value). Differences stand on a
logarithmic axis with a place for 0: their `y` are heights, `shown` the values themselves, `ticks` the axis. Where a
point stands for several steps, `x` is their middle and `stretch` their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_parity.parity.report.decades import Decades
from ds_parity.parity.report.series import GROUPS, Gaps, Line, Run

Chart = dict[str, Any]
_ODD = "NaN, infinite or in one run only"


def curves(reference: Run, candidate: Run, fields: Sequence[tuple[str, str]]) -> tuple[Chart, ...]:
    """Return a chart for each field that a run has; runs that are alike in it are one line, and a constant a sentence.

    Args:
        reference: what is drawn of the reference.
        candidate: the same of the candidate.
        fields: names and titles.
    """
    groups = max(reference.groups, candidate.groups)
    of_groups = f" of the first {GROUPS} of {groups} parameter groups" if groups > GROUPS else ""
    every = (
        (title.replace("\n", " ") + (of_groups if name == "lr" else ""), reference.lines[name], candidate.lines[name])
        for name, title in fields
    )
    return tuple(_curve(title, a, b) for title, a, b in every if a or b)


def skipped(reference: Run, candidate: Run) -> tuple[Chart, ...]:
    """Return a sentence on the steps that took no update, none where all did."""
    a, b = reference.skipped, candidate.skipped
    if not (a or b):
        return ()
    alike = a.digest == b.digest
    said = f"{a}, in both runs" if alike else f"reference: {a if a else 'none'}; candidate: {b if b else 'none'}"
    return ({"title": "skipped steps", "said": said},)


def gap(title: str, gaps: Gaps) -> Chart:
    """Return how far two runs lie apart in one quantity, and how far they may."""
    scale = Decades.over(gaps.within[1], gaps.over[1], gaps.bound[1])
    x = np.unique(np.concatenate([gaps.within[0], gaps.over[0], gaps.bound[0], gaps.odd]))
    series = [
        _placed(label, role, x, points, scale(points[1]))
        for label, role, points in (
            ("bound", "bound", gaps.bound),
            ("within its bound", "within", gaps.within),
            ("differs", "over", gaps.over),
        )
        if len(points[0])
    ]
    if len(gaps.odd):
        top = np.full(len(gaps.odd), scale.top)
        series.append(_placed(_ODD, "over", x, (gaps.odd, np.full(len(gaps.odd), np.nan)), top))
    ticks = scale.ticks(with_top=bool(len(gaps.odd)))
    return {
        "title": title,
        "x": _numbers(x),
        "series": series,
        "ticks": [[height, label.replace("\n", " ")] for height, label in ticks.items()],
        "range": list(scale.limits(with_top=bool(len(gaps.odd)))),
    }


def _curve(title: str, a: tuple[Line, ...], b: tuple[Line, ...]) -> Chart:
    if _alike(a, b):
        if (constant := _constant(a)) is not None:
            return {"title": title, "said": f"{constant:g} at every step, in both runs"}
        lines = list(_series("both runs", "both", a))
    else:
        lines = [*_series("reference", "reference", a), *_series("candidate", "candidate", b)]
    first = (a or b)[0]
    return {"title": title, "x": _numbers(first.x), "stretch": first.stretch, "series": lines}


def _series(side: str, role: str, lines: tuple[Line, ...]) -> Iterator[Chart]:
    """One line for the parameter groups with the same values; the least and the greatest of a stretch are two."""
    for line in lines:
        label = side if len(lines) == 1 else f"{side}, {_numbered(line.groups)}"
        steps = "step" if line.odd.count == 1 else "steps"
        odd = {"odd": f"{label}: NaN or infinite in {steps} {line.odd}"} if line.odd else {}
        if line.stretch == 1:
            yield {"label": label, "role": role, "y": _numbers(line.low), **odd}
        else:
            yield {"label": f"{label}, least", "role": role, "y": _numbers(line.low), **odd}
            yield {"label": f"{label}, greatest", "role": role, "y": _numbers(line.high)}


def _numbered(groups: tuple[int, ...]) -> str:
    *others, last = map(str, groups)
    return f"groups {', '.join(others)} and {last}" if others else f"group {last}"


def _alike(a: tuple[Line, ...], b: tuple[Line, ...]) -> bool:
    return [(one.values, one.groups) for one in a] == [(one.values, one.groups) for one in b]


def _constant(lines: tuple[Line, ...]) -> float | None:
    """The one value that all steps of a single line have, None where they have several."""
    line = lines[0]
    values = np.concatenate([line.low, line.high])
    return float(values[0]) if len(lines) == 1 and not line.odd and (values == values[0]).all() else None


def _placed(
    label: str, role: str, x: NDArray[Any], points: tuple[NDArray[Any], NDArray[Any]], y: NDArray[Any]
) -> Chart:
    """One series on the steps of all, None where it has no point."""
    heights, values = np.full(len(x), np.nan), np.full(len(x), np.nan)
    places = np.searchsorted(x, points[0])
    heights[places], values[places] = y, points[1]
    return {"label": label, "role": role, "y": _numbers(heights), "shown": _numbers(values)}


def _numbers(values: NDArray[Any]) -> list[float | int | None]:
    """Numbers as JSON has them: steps and counts without a decimal point, and None for what is no number."""
    return [None if not np.isfinite(it) else int(it) if _whole(it) else float(it) for it in values]


def _whole(value: float) -> bool:
    return float(value).is_integer() and abs(value) <= 2**63
