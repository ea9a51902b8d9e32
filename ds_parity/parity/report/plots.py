"""The pictures of a comparison as PNGs. Figures are drawn by themselves: pyplot's state is not touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from ds_parity.errors import ConfigError
from ds_parity.parity.report import charts
from ds_parity.parity.report.charts import Chart
from ds_parity.parity.report.contents import Compared
from ds_parity.parity.report.decades import Decades
from ds_parity.parity.report.series import Gaps, Line, Run, gaps, read_run
from ds_parity.parity.report.thinning import thinned

# Okabe and Ito's colours. Reference and candidate are told apart by width and dashes too, differences by their marks.
_ORANGE, _BLUE, _VERMILION, _GREEN, _GREY = "#E69F00", "#0072B2", "#D55E00", "#009E73", "#606060"
_REFERENCE = {"color": _ORANGE, "linewidth": 5.0, "marker": "o", "markersize": 10}
_CANDIDATE = {"color": _BLUE, "linewidth": 1.6, "linestyle": (0, (4, 2)), "marker": "o", "markersize": 4}
_FEW = 60
_DPI = 110

_CURVES = (("loss", "loss"), ("grad_norm", "gradient norm\nbefore clipping"), ("lr", "learning rate"))
_WINDOWS = (
    ("rollouts", "rollouts\nin a step"),
    ("passes", "passes\nin a step"),
    ("idle_passes", "idle passes\nin a step"),
)
_MEASURED = (("loss", "loss"), ("grad_norm", "gradient norm"), ("weights", "weights"), ("lr", "learning rate"))


@dataclass(frozen=True)
class Picture:
    """What one picture shows, as an image and as values.

    Attributes:
        name: the part of its file's name that says what it shows.
        caption: the same in words.
        png: the image.
        charts: the values of its panels (`charts`).
    """

    name: str
    caption: str
    png: bytes
    charts: tuple[Chart, ...] = ()


def check_matplotlib() -> None:
    """Refuse to go on without matplotlib.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401  both are what `_figure` needs
    except ImportError:
        raise ConfigError(
            "--report draws with matplotlib, which is not installed: pip install 'ds_parity[report]'"
        ) from None


@dataclass(frozen=True)
class _Shown:
    """A comparison, with what is drawn of it."""

    compared: Compared
    reference: Run
    candidate: Run
    gaps: dict[str, Gaps]


def pictures(compared: Compared) -> tuple[Picture, ...]:
    """Draw a comparison; none where neither trace has a step."""
    if not compared.comparison.rows:
        return ()
    names = [name for name, _ in (*_CURVES, *_WINDOWS)]
    a, b = (read_run(side.trace, names, compared.steps) for side in (compared.reference, compared.candidate))
    apart = gaps(compared.setting(), [name for name, _ in _MEASURED])
    shown = _Shown(compared, a, b, apart)
    drawn = [
        Picture(
            "curves",
            "loss, gradient norm and learning rate of both runs, step by step",
            _curves(shown),
            (*charts.curves(a, b, _CURVES), *charts.skipped(a, b)),
        )
    ]
    if unlike := _unlike(shown):
        alike = ", ".join(label for name, label in _MEASURED if (name, label) not in unlike)
        drawn.append(
            Picture(
                "differences",
                "differences between the runs, step by step, and the bound that each must not exceed"
                + (f"; no difference in: {alike}" if alike else ""),
                _differences(shown, unlike),
                tuple(charts.gap(f"relative difference in {label}", apart[name]) for name, label in unlike),
            )
        )
    windows = Picture(
        "windows", "rollouts, passes and idle passes of every step", _windows(shown), charts.curves(a, b, _WINDOWS)
    )
    return (*drawn, windows)


def _unlike(shown: _Shown) -> tuple[tuple[str, str], ...]:
    """The quantities with a difference to draw: axes without one would all be alike."""
    compared = [one for one in _MEASURED if one[0] not in shown.compared.comparison.not_compared]
    return tuple((name, label) for name, label in compared if shown.gaps[name].any)


def _curves(shown: _Shown) -> bytes:
    def draw(figure: Any) -> None:
        panels = _stack(figure, shown, _CURVES)
        stood_still = np.union1d(shown.reference.skipped.drawn, shown.candidate.skipped.drawn)
        stood_still = stood_still[thinned(stood_still)]
        for axes in panels:
            _edge(axes, stood_still, 0.04, {"marker": "|", "markersize": 9, "color": _GREY}, "skipped step")

    return _png(shown.compared, (10, 8), draw)


def _windows(shown: _Shown) -> bytes:
    def draw(figure: Any) -> None:
        for axes in _stack(figure, shown, _WINDOWS, drawstyle="steps-mid"):
            low, high = axes.get_ylim()
            axes.set_ylim(min(0.0, low), high + 0.1 * (high - low))
            _whole(axes.yaxis)

    return _png(shown.compared, (10, 7), draw)


def _stack(figure: Any, shown: _Shown, fields: Sequence[tuple[str, str]], **style: Any) -> list[Any]:
    """Draw one panel a field, over one axis of steps."""
    panels = list(figure.subplots(len(fields), 1, sharex=True))
    for axes, (name, label) in zip(panels, fields, strict=True):
        axes.set_ylabel(label)
        if name in shown.compared.comparison.not_compared:
            axes.set_title("not compared", loc="right", fontsize="small", color=_GREY)
        if not _lines(axes, shown, name, style):
            _absent(axes)
    panels[-1].set_xlabel("optimizer step")
    return panels


def _lines(axes: Any, shown: _Shown, name: str, style: dict[str, Any]) -> int:
    """Draw a field of both runs; returns the number of lines."""
    drawn = 0
    for side, one, look, height in (
        ("reference", shown.reference, _REFERENCE, 0.94),
        ("candidate", shown.candidate, _CANDIDATE, 0.86),
    ):
        for line in one.lines[name]:
            if line.finite:
                label = side if line.stretch == 1 else f"{side}: least and greatest of {line.stretch} steps"
                (_values if line.stretch == 1 else _band)(axes, line, label, {**look, **style})
            mark = {"marker": "X", "markersize": 9, "color": look["color"], "markeredgecolor": "black"}
            _edge(axes, line.odd.drawn, height, mark, f"{side}: NaN or infinite")
            if line.odd:
                axes.margins(y=0.25)
            drawn += 1
    return drawn


def _values(axes: Any, line: Line, label: str, look: dict[str, Any]) -> None:
    """Draw a value a step, with marks where they can be told apart, and where a line alone would show nothing."""
    marked = line.alone if len(line.x) > _FEW else np.arange(len(line.x))
    look = look if len(marked) else {**look, "marker": ""}
    axes.plot(line.x, line.low, label=label, markevery=marked if len(marked) else None, **look)


def _band(axes: Any, line: Line, label: str, look: dict[str, Any]) -> None:
    """Draw many steps: the reference as a filled band, the candidate as the band's two edges."""
    filled = look["color"] == _ORANGE
    if filled:
        axes.fill_between(line.x, line.low, line.high, color=_ORANGE, alpha=0.6, linewidth=3, label=label)
    else:
        edges = {"color": look["color"], "linewidth": 1.0, "linestyle": look["linestyle"]}
        axes.plot(line.x, line.low, label=label, **edges)
        axes.plot(line.x, line.high, **edges)
    at = line.alone
    dots = {"linestyle": "", "marker": "o", "markersize": 6 if filled else 2.5, "color": look["color"]}
    for edge in (line.low, line.high):
        axes.plot(line.x[at], edge[at], **dots)


def _differences(shown: _Shown, unlike: Sequence[tuple[str, str]]) -> bytes:
    columns = min(2, len(unlike))
    rows = -(-len(unlike) // columns)

    def draw(figure: Any) -> None:
        grid = figure.add_gridspec(rows, columns)
        for at, (name, label) in enumerate(unlike):
            axes = figure.add_subplot(grid[at // columns, at % columns])
            axes.set_title(label, loc="left", fontsize="medium")
            _gaps(axes, shown.gaps[name])
            if at + columns >= len(unlike):
                axes.set_xlabel("optimizer step")
        figure.supylabel("relative difference\n(logarithmic; 0 at the foot)", fontsize="medium")

    return _png(shown.compared, (10, 1 + 3 * rows), draw)


def _gaps(axes: Any, shown: Gaps) -> None:
    scale = Decades.over(shown.within[1], shown.over[1], shown.bound[1])
    size = 6 if len(shown.within[0]) + len(shown.over[0]) <= _FEW else 3
    bound = {"color": "black", "linestyle": "--", "linewidth": 1.3}
    if len(shown.bound[0]) == 1:
        axes.axhline(scale(shown.bound[1])[0], label="bound", **bound)
    else:
        axes.plot(shown.bound[0], scale(shown.bound[1]), label="bound", **bound)
    dots = {"linestyle": "", "markersize": size}
    axes.plot(shown.within[0], scale(shown.within[1]), label="within its bound", marker="o", color=_BLUE, **dots)
    over = {**dots, "markersize": size + 2, "marker": "D", "color": _VERMILION, "markeredgecolor": "black"}
    if len(shown.over[0]):
        axes.plot(shown.over[0], scale(shown.over[1]), label="differs", markeredgewidth=0.5, **over)
    if len(shown.odd):
        top = np.full(len(shown.odd), scale.top)
        mark = {"marker": "X", "markersize": 9, "color": _VERMILION, "markeredgecolor": "black"}
        axes.plot(shown.odd, top, linestyle="", label="differs: NaN, infinite or in one run only", **mark)
    scale.put_on(axes, with_top=bool(len(shown.odd)))


def _png(compared: Compared, size: tuple[float, float], draw: Callable[[Any], None]) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        # A user's own style must not change a report, nor a dollar sign in a path become a formula.
        matplotlib.rcdefaults()
        matplotlib.rcParams["text.parse_math"] = False
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        _finish(figure, compared)
        written = BytesIO()
        figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def _finish(figure: Any, compared: Compared) -> None:
    """Put what all pictures share on a figure: the title, the first difference, the axis of steps, the legend."""
    first = compared.comparison.first
    start, end = compared.steps
    legend: dict[str, Any] = {}
    for axes in figure.axes:
        if first is not None and first.step is not None:
            look = {"color": _GREEN, "linestyle": ":", "linewidth": 2}
            axes.axvline(first.step, zorder=0.5, label=f"first difference: step {first.step}", **look)
        pad = max(0.5, 0.02 * (end - start), 1e-12 * end)  # the last: where floats have no halves left
        axes.set_xlim(start - pad, end + pad)
        _whole(axes.xaxis)
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        legend |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in legend}
    legend = dict(sorted(legend.items(), key=lambda entry: entry[0].startswith("first difference")))
    figure.suptitle(_plain(compared.title), fontsize="large")
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False)


def _edge(axes: Any, x: Any, height: float, look: dict[str, Any], label: str) -> None:
    """Mark steps at a height of the panel, whatever its scale."""
    if len(x):
        axes.plot(x, np.full(len(x), height), transform=axes.get_xaxis_transform(), linestyle="", label=label, **look)


def _absent(axes: Any) -> None:
    box = {"facecolor": "white", "edgecolor": "none"}
    centred = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, "neither run has it", color=_GREY, bbox=box, **centred)
    axes.set_yticks([])


def _whole(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _plain(text: str) -> str:
    """What the font of a picture can show of a name, within a picture's width."""
    shown = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
    return shown if len(shown) <= 90 else f"{shown[:43]} ... {shown[-42:]}"
