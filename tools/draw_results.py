"""Draw the main ratios of benchmarks/RESULTS.md, and the growth with ranks, as SVG in a light and in a dark theme.

python tools/draw_results.py    # docs/pictures/ratios*.svg and growth*.svg, of the figures in RESULTS.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from draw_pictures import Sheet, write_all
from online.curves import Line, panel
from results_tables import OWN, rows

GROUPS = {
    "by-hand": (
        "counts known ahead, rollouts of full length",
        "counts pass by pass, rollouts of 192 tokens",
        "the same with 3.3 million parameters",
    ),
    "whole-windows": ("windows known ahead, 3.3 million parameters", "the last by chance: by hand / by hand"),
}
"""Sections to what their rows are called in the picture."""
GROWTH = {
    "messages of the busiest rank in a window": 2,
    "bytes that it sends": 3,
    "its sockets": 4,
    "time of a plan for each rollout, on 8 ranks 1": 7,
}
"""What is drawn of the section `scale`, and its column."""

_LEFT, _RIGHT, _LINE = 84, 404, 22
_ENDS = (0.8, 1.6)


def ratios(sheet: Sheet) -> str:
    """Draw the time of a window beside the engine driven by hand: medians and quartiles by stage."""
    sheet.text(240, 32, "Time of a window", 20, anchor="middle", bold=True)
    sheet.text(240, 56, "ds_parity / the engine driven by hand, on 2 CPU ranks:", 14, ink="muted", anchor="middle")
    sheet.text(240, 76, "the median, and a line from quartile to quartile.", 14, ink="muted", anchor="middle")
    top, described = 112.0, []
    for section, names in GROUPS.items():
        ratios_alone = [row for row in rows(section) if row[0] != OWN]
        for name, (_, *cells) in zip(names, ratios_alone, strict=True):
            sheet.text(12, top, name, 14, bold=True)
            begun = top + 8
            for stage, cell in enumerate(cells):
                top += _LINE
                _ratio(sheet, top, f"ZeRO {stage}", cell)
            # Where both take as long.
            sheet.line((_across(1), begun), (_across(1), top + 6), ink="good", width=1.5)
            medians = " ".join(cell.split()[0] for cell in cells)
            described.append(f"{name}: {medians}")
            top += 32
    for value in (_ENDS[0], 1.0, _ENDS[1]):
        sheet.text(_across(value), top, f"{value:.1f}", 14, ink="muted", anchor="middle")
    return sheet.svg(top + 16, "Time of a window beside the engine driven by hand", f"{'; '.join(described)}.")


def _ratio(sheet: Sheet, y: float, name: str, cell: str) -> None:
    median, low, high = (float(number) for number in re.findall(r"[\d.]+\d", cell)[:3])
    sheet.text(12, y, name, 14, ink="muted")
    sheet.line((_across(low), y - 5), (_across(high), y - 5), ink="rank0 edge", width=2)
    sheet.box(_across(median) - 5, y - 10, 10, 10, "rank0 edge")
    sheet.text(468, y, f"{median:.2f}", 14, anchor="end")


def _across(value: float) -> float:
    share = (min(max(value, _ENDS[0]), _ENDS[1]) - _ENDS[0]) / (_ENDS[1] - _ENDS[0])
    return round(_LEFT + (_RIGHT - _LEFT) * share, 1)


def growth(sheet: Sheet) -> str:
    """Draw what a window costs a rank as ranks become more."""
    found = rows("scale")
    ranks = [row[0] for row in found]
    sheet.text(240, 32, "Growth with ranks", 20, anchor="middle", bold=True)
    said = f"{', '.join(ranks[:-1])} and {ranks[-1]} ranks,"
    sheet.text(240, 56, said, 14, ink="muted", anchor="middle")
    sheet.text(240, 76, "each 8 times as many as the one on its left.", 14, ink="muted", anchor="middle")
    top, described = 112.0, []
    for name, column in GROWTH.items():
        values = [float(row[column].replace(",", "")) for row in found]
        panel(sheet, top, name, [Line(values, "rank0 edge")], ends=(0.0, max(values)), height=70)
        described.append(f"{name}: {', '.join(row[column] for row in found)}")
        top += 112
    sheet.text(76, top - 4, f"{ranks[0]} ranks", 14, ink="muted")
    sheet.text(456, top - 4, f"{ranks[-1]} ranks", 14, ink="muted", anchor="end")
    return sheet.svg(top + 12, "What a window costs a rank, by ranks", f"{'; '.join(described)}.")


PICTURES: dict[str, Callable[[Sheet], str]] = {"ratios": ratios, "growth": growth}

if __name__ == "__main__":
    write_all(PICTURES)
