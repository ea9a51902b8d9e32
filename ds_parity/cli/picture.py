"""A plan for people: its windows in a table, and one window as ranks x passes filled by tokens, as text or PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ds_parity.cli.console import printed
from ds_parity.errors import ConfigError
from ds_parity.planning.plans import Plan, WindowPlan, fewest_passes

_FILLED, _PLAIN = " ▁▂▃▄▅▆▇█", " 12345678"
_IDLE, _PLAIN_IDLE = "·", "."
_ROWS = 20


def figures(planned: Plan) -> dict[str, Any]:
    """Return what a plan comes to, as plain values.

    `computed`: tokens that micro-batches compute on, of which `padding` stand for nothing; `waited`: what ranks could
    have computed while they waited for the longest micro-batch of a pass; `busiest`: the most that a rank computes
    beside the mean of all. `waiting`: the share of the time in which ranks wait for each other, and `waiting_at_steps`
    where they do so in the step alone, both by the plan's cost; None where it was made by tokens.
    """
    computed = sum(int(window.sizes.sum()) for window in planned.windows)
    filled = sum(int(planned.lengths[window.rollouts].sum()) for window in planned.windows)
    done = sum(window.sizes.sum(axis=0) for window in planned.windows)
    fewest = planned.fewest_passes()
    return {
        "windows": len(planned.windows),
        "rollouts": sum(len(window.rollouts) for window in planned.windows),
        "left": len(planned.left),
        "passes": planned.passes,
        "fewest_passes": fewest,
        "of_fewest": planned.passes / fewest if fewest else None,
        "idle_passes": planned.idle_passes,
        "computed": computed,
        "padding": computed - filled,
        "waited": sum(window.waited_tokens for window in planned.windows),
        "busiest": float(done.max() / done.mean()) if planned.windows else None,
        "waiting": planned.waiting() if planned.cost else None,
        "waiting_at_steps": planned.waiting(at_step=True) if planned.cost else None,
    }


def table(planned: Plan) -> Table:
    """One line a window, the first 20 of them."""
    shown = planned.windows[:_ROWS]
    left = len(planned.windows) - len(shown)
    result = Table(title="windows", caption=f"and {left} more" if left else None)
    for name in ("window", "rollouts", "passes", "fewest", "idle passes", "filled"):
        result.add_column(name, justify="right")
    for number, window in enumerate(shown):
        fewest = fewest_passes(planned.lengths[window.rollouts], planned.dp_world_size, planned.max_tokens)
        filled = np.minimum(window.sizes, planned.max_tokens).sum() / (window.sizes.size * planned.max_tokens)
        cells = (number, len(window.rollouts), window.passes, fewest, window.idle_passes)
        result.add_row(*map(str, cells), f"{filled:.1%}")
    return result


def drawn(window: WindowPlan, max_tokens: int) -> str:
    """Return a window as text: a line a rank, a character a pass, as high as its micro-batch is full.

    Where standard output can't write such characters, the height is a digit from 1 to 8, and an idle pass a point.
    """
    rows = []
    filled, idle = printed(_FILLED, _PLAIN), printed(_IDLE, _PLAIN_IDLE)
    for rank, sizes in enumerate(window.sizes.T.tolist()):
        marks = (filled[min(8, -(-8 * size // max_tokens))] if size else idle for size in sizes)
        rows.append(f"rank {rank:>4} |{''.join(marks)}|")
    return "\n".join(rows)


def write_pngs(planned: Plan, folder: Path) -> None:
    """Draw the windows that `table` shows as images, `window0000.png` and on.

    Raises:
        ConfigError: matplotlib is not installed, or the folder can't be written.
    """
    for number, window in enumerate(planned.windows[:_ROWS]):
        write_png(window, planned.max_tokens, folder / f"window{number:04d}.png")


def write_png(window: WindowPlan, max_tokens: int, path: Path) -> None:
    """Draw a window as an image: passes from left to right, ranks from top to bottom, idle passes crossed out.

    Raises:
        ConfigError: matplotlib is not installed, or the path can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError(
            "--report draws with matplotlib, which is not installed: pip install 'ds_parity[report]'"
        ) from None
    passes, ranks = window.sizes.shape
    figure = Figure(figsize=(min(16.0, 3 + 0.3 * passes), min(12.0, 1.5 + 0.3 * ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        window.sizes.T, vmin=0, vmax=max(max_tokens, int(window.sizes.max())), aspect="auto", cmap="viridis"
    )
    idle = (window.sizes.T == 0).nonzero()
    axes.scatter(idle[1], idle[0], marker="x", color="white")
    axes.set(xlabel="pass", ylabel="rank", title=f"{len(window.rollouts)} rollouts in {passes} passes")
    for axis in (axes.xaxis, axes.yaxis):
        # Beyond the ends of the image there are no passes and no ranks, and none between two of them.
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    figure.colorbar(image, label=f"tokens of {max_tokens:,}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: can't be written ({error.strerror or error}); give --report a folder") from error
