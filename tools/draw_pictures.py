"""Draw the pictures of the documentation as SVG, in a light and in a dark theme.

    python tools/draw_pictures.py

writes docs/pictures/NAME-THEME.svg. The same script always writes the same bytes: there is no date, no random name and
no font in them. Text is text, in whatever plain font the reader's machine has, with room for a wide one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"

# Blue and orange are told apart by the colour-blind; ranks are told apart by their place and their name, too.
THEMES = {
    "light": {
        "paper": "#ffffff", "raised": "#f4f6f8", "ink": "#1b1f24", "muted": "#57606a", "line": "#8c959f",
        "rank0": "#dcebfb", "rank0 edge": "#0a5fb4", "rank1": "#fdead7", "rank1 edge": "#b04a00",
        "good": "#00654b", "good paper": "#dff2ec", "on good": "#ffffff",
    },
    "dark": {
        "paper": "#14181d", "raised": "#1f252c", "ink": "#e8edf2", "muted": "#a6b0bb", "line": "#75808c",
        "rank0": "#12304e", "rank0 edge": "#6cb2f5", "rank1": "#45290f", "rank1 edge": "#f5a35c",
        "good": "#5fd0ae", "good paper": "#103a2f", "on good": "#0a1512",
    },
}  # fmt: skip
TEXT_ON = [
    *[(ink, paper) for ink in ("ink", "muted") for paper in ("paper", "raised")],
    *[("ink", paper) for paper in ("rank0", "rank1", "good paper")],
    *[(f"rank{rank} edge", "paper") for rank in (0, 1)],
    ("good", "paper"),
    ("on good", "good"),
]
"""Which colour is written on which: each pair must be easy to read."""

TARGET = 8
PASSES = (((2, "0.4"), (3, "0.2")), ((1, "1.0"), (0, "0")), ((1, "0.6"), (3, "1.0")))
"""Rollouts and gradient of the mean loss, by pass and rank. A rank without rollouts runs an idle pass."""

HOPS = (
    ("ds_parity.engine.engine", "ParityEngine.backward", "checks the numbers and makes one Counts of them"),
    ("ds_parity.engine.driver", "Driver.run_pass", "announces the Counts; they weigh the loss later"),
    ("ds_parity.engine.ranks.exchange", "Exchange.start", "has them summed over all ranks, to PassTotals"),
    ("ds_parity.window.ledger", "Ledger.count", "adds the sum to the window: is it full?"),
    ("ds_parity.engine.boundary", "Boundary.update", "makes a StepRecord of the window that closed"),
    ("ds_parity.trace.writer", "TraceWriter.write", "writes the record as one line of the trace"),
)
"""Module, name in it, and what it does to the number that `backward(loss, rollouts=...)` was given."""

_WIDTH = 480
_MARGIN = 12
_SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Sheet:
    """Shapes and texts of one picture, in the order in which they lie over each other.

    Args:
        theme: name of the theme.
    """

    def __init__(self, theme: str) -> None:
        self.colours = THEMES[theme]
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "", *, dashed: bool = False
    ) -> None:
        """Draw a box with round corners; `fill` and `edge` are names of colours."""
        stroke = f' stroke="{self.colours[edge]}" stroke-width="1.5"' if edge else ""
        stroke += ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" '
            f'fill="{self.colours[fill]}"{stroke}/>'
        )

    def text(
        self, x: float, y: float, words: str, size: float = 14, *, ink: str = "ink", anchor: str = "start",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        """Write one line; `y` is where its letters stand."""
        weight = ' font-weight="650"' if bold else ""
        family = f' font-family="{_MONO}"' if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{self.colours[ink]}" '
            f'text-anchor="{anchor}"{weight}{family}>{escape(words)}</text>'
        )

    def line(self, *points: tuple[float, float], ink: str = "line", width: float = 1.5, arrow: bool = False) -> None:
        """Draw a line through points, with an arrow at its end where one is asked for."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.colours[ink]}" stroke-width="{width:g}"{head}/>'
        )

    def badge(self, x: float, y: float, number: int) -> None:
        """Draw a number in a filled circle around a point."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="11" fill="{self.colours["good"]}"/>')
        self.text(x, y + 5, str(number), 14, ink="on good", anchor="middle", bold=True)

    def svg(self, height: float, title: str, description: str) -> str:
        """Return the whole picture."""
        head = (
            f'<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{self.colours["line"]}"/></marker>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
            f'height="{height:g}" role="img" font-family="{_SANS}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            f"<defs>{head}</defs>",
            f'<rect width="{_WIDTH}" height="{height:g}" rx="10" fill="{self.colours["paper"]}"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def write_all(pictures: Mapping[str, Callable[[Sheet], str]]) -> None:
    """Write every picture in every theme into the documentation's folder, as NAME-THEME.svg."""
    for name, draw in pictures.items():
        for theme in THEMES:
            (FOLDER / f"{name}-{theme}.svg").write_text(draw(Sheet(theme)), encoding="utf-8")


_BLOCK = 150
_MIDDLE = (_MARGIN + _BLOCK, _WIDTH - _MARGIN - _BLOCK)
_BAND = 104


def _window(sheet: Sheet) -> str:
    centre = _WIDTH / 2
    sheet.text(centre, 32, "One window, two ranks", 20, anchor="middle", bold=True)
    for y, line in (
        (56, f"It closes when all ranks together have run {TARGET} rollouts."),
        (76, "A block is a micro-batch: its rollouts, and g, the"),
        (96, "gradient of its mean loss. Time runs downwards."),
    ):
        sheet.text(centre, y, line, 14, ink="muted", anchor="middle")
    sheet.text(_MARGIN + _BLOCK / 2, 130, "rank 0", 16, ink="rank0 edge", anchor="middle", bold=True)
    sheet.text(_WIDTH - _MARGIN - _BLOCK / 2, 130, "rank 1", 16, ink="rank1 edge", anchor="middle", bold=True)
    sheet.text(centre, 122, "exchange of", 14, ink="muted", anchor="middle")
    sheet.text(centre, 139, "the counts", 14, ink="muted", anchor="middle")
    counted, top = 0, 148.0
    for number, ranks in enumerate(PASSES):
        counted += sum(weight for weight, _ in ranks)
        _pass(sheet, top, number, ranks, counted)
        top += _BAND
    return _boundary(sheet, top + 6, counted)


def _pass(sheet: Sheet, top: float, number: int, ranks: tuple[tuple[int, str], ...], counted: int) -> None:
    """One pass: what each rank runs, and between them what the exchange of their counts comes to."""
    centre = _WIDTH / 2
    for rank, (weight, mean) in enumerate(ranks):
        _micro_batch(sheet, _MARGIN if rank == 0 else _MIDDLE[1], top, rank, weight, mean)
    sheet.text(centre, top + 18, f"pass {number + 1}", 14, ink="muted", anchor="middle")
    sheet.line((_MIDDLE[0] + 3, top + 44), (centre - 38, top + 44), arrow=True)
    sheet.line((_MIDDLE[1] - 3, top + 44), (centre + 38, top + 44), arrow=True)
    sheet.box(centre - 36, top + 30, 72, 28, "raised", "line")
    sheet.text(centre, top + 49, " + ".join(str(weight) for weight, _ in ranks), 15, anchor="middle", bold=True)
    if counted < TARGET:
        sheet.text(centre, top + 78, f"{counted} of {TARGET}", 15, anchor="middle")
    else:
        sheet.box(centre - 50, top + 64, 100, 38, "good")
        sheet.text(centre, top + 80, f"{counted} of {TARGET}:", 14, ink="on good", anchor="middle", bold=True)
        sheet.text(centre, top + 96, "boundary", 14, ink="on good", anchor="middle", bold=True)


def _micro_batch(sheet: Sheet, x: float, top: float, rank: int, weight: int, mean: str) -> None:
    centre, height = x + _BLOCK / 2, _BAND - 14
    if not weight:
        sheet.box(x, top, _BLOCK, height, "paper", "line", dashed=True)
        sheet.text(centre, top + 36, "idle pass", 15, ink="muted", anchor="middle", bold=True)
        sheet.text(centre, top + 58, "0 rollouts", 14, ink="muted", anchor="middle")
        sheet.text(centre, top + 77, "adds exactly 0", 14, ink="muted", anchor="middle")
        return
    sheet.box(x, top, _BLOCK, height, f"rank{rank}", f"rank{rank} edge")
    left = centre - (weight * 22 - 4) / 2
    for one in range(weight):
        sheet.box(left + 22 * one, top + 11, 18, 18, f"rank{rank} edge")
    said = f"w = {weight} {'rollout' if weight == 1 else 'rollouts'}"
    sheet.text(centre, top + 53, said, 15, anchor="middle", bold=True)
    sheet.text(centre, top + 76, f"gradient g = {mean}", 14, anchor="middle")


def _boundary(sheet: Sheet, top: float, total: int) -> str:
    """What happens at the boundary, line by line, and the picture as a whole."""
    parts = [(weight, mean) for ranks in PASSES for weight, mean in ranks if weight]
    weighed = sum(weight * Fraction(mean) for weight, mean in parts)
    wrong = sum(Fraction(mean) for _, mean in parts) / len(parts)
    accumulated, step = weighed / TARGET, weighed / total
    sheet.line((_MARGIN, top), (_WIDTH - _MARGIN, top), ink="good", width=3)
    sum_of = " + ".join(f"{weight}×{mean}" for weight, mean in parts)
    lines = (
        ("Before its backward, each mean loss is multiplied", f"by w / expected total, w / {TARGET}. Accumulated:",
         f"({sum_of})", f"/ {TARGET}  =  {float(accumulated):g}"),
        ("At the boundary the total is known. The correction", "is expected total / total:", "",
         f"{float(accumulated):g} × {TARGET} / {total}  =  {float(step):g}"),
    )  # fmt: skip
    y = top + 30
    for number, (first, second, *formulas) in enumerate(lines, start=1):
        sheet.badge(_MARGIN + 12, y + 5, number)
        for line in (first, second):
            sheet.text(_MARGIN + 34, y, line, 14)
            y += 20
        y += 4
        for formula in filter(None, formulas):
            sheet.text(_MARGIN + 34, y, formula, 15, bold=True)
            y += 22
        y += 14
    sheet.box(_MARGIN, y - 10, _WIDTH - 2 * _MARGIN, 66, "good paper", "good")
    sheet.text(_WIDTH / 2, y + 15, "step gradient  =  sum of w × g  /  sum of w", 16, anchor="middle", bold=True)
    sheet.text(_WIDTH / 2, y + 40, f"over all ranks and passes:  {float(weighed):g} / {total}  =  {float(step):g}", 15,
               anchor="middle")  # fmt: skip
    y += 80
    for line in (
        f"The plain mean of the {len(parts)} gradients is {float(wrong):g}, which is wrong.",
        f"The {total - TARGET} rollouts beyond the target count for the next window.",
    ):
        sheet.text(_WIDTH / 2, y, line, 14, ink="muted", anchor="middle")
        y += 22
    description = (
        f"Two ranks run {len(PASSES)} passes. Their rollouts are summed in each: {total} reach the target of {TARGET} "
        f"in the last, which is the boundary. The gradient accumulated with the expected total {TARGET} is "
        f"{float(accumulated):g}; times {TARGET} / {total} it is {float(step):g}, the mean weighed by rollouts."
    )
    return sheet.svg(y, "One window over two ranks", description)


Room = tuple[str, str, str, tuple[int, ...]]
_FLOORS: tuple[tuple[Room, ...], ...] = (
    (("cli", "the command line", "", ()), ("pytest_plugin.py", "a fixture for tests", "", ())),
    (("parity", "the harness: runs an engine and its references,", "and compares what they did", ()),),
    (
        ("engine", "a proxy around", "DeepSpeed's engine", (1, 2, 3, 5)),
        ("collation.py", "rollouts", "to tensors", ()),
        ("losses.py", "losses", "for a policy", ()),
    ),
    (("token_losses.py", "what losses are made of", "", ()),),
    (("sketches.py", "all weights of a model in a few numbers", "", ()),),
    (("all_weights.py", "every weight, whatever ZeRO stage has it", "", ()),),
    (
        ("window", "when is a", "step due?", (4,)),
        ("config", "the JSON", "keys", ()),
        ("planning", "rollouts to", "passes", ()),
        ("trace", "one line", "a step", (6,)),
    ),
    (("values", "how values of a configuration are read", "", ()),),
    (("errors", "every exception that is raised on purpose", "", ()),),
)
"""Rooms by floor: name, two lines of what it is for, and the hops that happen there."""
_SHARES = {"engine": 1.75, "collation.py": 1.12}
_HEIGHTS = (58, 76, 96, 58, 58, 58, 96, 58, 58)
_GAP = 22


def _architecture(sheet: Sheet) -> str:
    sheet.text(_WIDTH / 2, 32, "How ds_parity is built", 20, anchor="middle", bold=True)
    sheet.text(
        _WIDTH / 2, 54, "A floor imports from the floors below it, never upwards.", 14, ink="muted", anchor="middle"
    )
    top = 70.0
    for at, (rooms, height) in enumerate(zip(_FLOORS, _HEIGHTS, strict=True)):
        _floor(sheet, top, height, rooms, light=at >= 6)
        top += height
        if at < len(_FLOORS) - 1:
            sheet.line((_WIDTH / 2, top + 2), (_WIDTH / 2, top + _GAP - 2), arrow=True)
            top += _GAP
    sheet.text(_WIDTH / 2, top + 22, "Orange: imports neither torch nor DeepSpeed.", 14, ink="muted", anchor="middle")
    top += 62
    sheet.text(_WIDTH / 2, top, "The six hops of a number", 18, anchor="middle", bold=True)
    sheet.text(_WIDTH / 2, top + 22, "from backward(loss, rollouts=4) to the trace", 14, ink="muted", anchor="middle")
    top += 50
    for number, (_, name, does) in enumerate(HOPS, start=1):
        if number < len(HOPS):
            sheet.line((_MARGIN + 16, top + 12), (_MARGIN + 16, top + 40), arrow=True)
        sheet.badge(_MARGIN + 16, top, number)
        sheet.text(_MARGIN + 40, top + 1, name, 15, bold=True, mono=True)
        sheet.text(_MARGIN + 40, top + 21, does, 14.5)
        top += 54
    floors = "; ".join(", ".join(room[0] for room in rooms) for rooms in _FLOORS)
    hops = "; ".join(f"{name} {does}" for _, name, does in HOPS)
    return sheet.svg(top - 12, "How ds_parity is built", f"Floors from the top: {floors}. Six hops: {hops}.")


def _floor(sheet: Sheet, top: float, height: float, rooms: tuple[Room, ...], *, light: bool) -> None:
    space, colour = 8, "rank1" if light else "rank0"
    shares = [_SHARES.get(room[0], 1.0) for room in rooms]
    unit = (_WIDTH - 2 * _MARGIN - space * (len(rooms) - 1)) / sum(shares)
    x = float(_MARGIN)
    for (name, first, second, hops), share in zip(rooms, shares, strict=True):
        width = unit * share
        sheet.box(x, top, width, height, colour, f"{colour} edge")
        y = top + 24
        sheet.text(x + width / 2, y, name, 14.5, anchor="middle", bold=True, mono=True)
        for line in filter(None, (first, second)):
            y += 18
            sheet.text(x + width / 2, y, line, 14, anchor="middle")
        for at, hop in enumerate(hops):
            sheet.badge(x + width / 2 + 28 * (at - (len(hops) - 1) / 2), top + height - 17, hop)
        x += width + space


PICTURES: dict[str, Callable[[Sheet], str]] = {"window": _window, "architecture": _architecture}


def main() -> None:
    """Write every picture in every theme."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_all(PICTURES)


if __name__ == "__main__":
    main()
