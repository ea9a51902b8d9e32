"""`ds-parity plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ds_parity.cli.console import out, print_json
from ds_parity.cli.options import Json, Ranks
from ds_parity.errors import ConfigError


def plan(
    rollouts: Annotated[
        Path | None,
        typer.Argument(help="JSON Lines: prompt, completion, reward; the bundled ones by default", show_default=False),
    ] = None,
    ranks: Ranks = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="greatest number of tokens in a micro-batch")] = 4096,
    target: Annotated[int, typer.Option(min=1, help="rollouts, or prompts, that close a window")] = 64,
    count: Annotated[str, typer.Option(help="what the target counts: rollout or prompt")] = "rollout",
    layout: Annotated[str, typer.Option(help="packed (end to end) or padded (to the longest)")] = "packed",
    oversize: Annotated[
        str, typer.Option(help="what to do with longer rollouts: refuse them, or give each its own micro-batch (own)")
    ] = "refuse",
    cost: Annotated[
        str | None,
        typer.Option(
            help="level the cost of ranks: PER_TOKEN,PER_SQUARE[,PER_PASS], or a model's config.json",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="folder for a picture of every window, up to 20", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan rollouts, and show their windows, passes and idle passes."""
    from ds_parity.cli import picture
    from ds_parity.cli.cost_option import cost_of
    from ds_parity.parity.data.rollouts import load_rollouts
    from ds_parity.planning import plan as planned_for

    options: dict[str, Any] = {"count": count, "layout": layout, "oversize": oversize}
    options["cost"] = None if cost is None else cost_of(cost)
    planned = planned_for(load_rollouts(rollouts), dp_world_size=ranks, target=target, max_tokens=max_tokens, **options)
    if not planned.windows:
        raise ConfigError(
            f"plan: {len(planned.rollouts)} rollouts make no window: one takes {target} {count}s; give more rollouts, "
            "or a smaller --target"
        )
    figures = picture.figures(planned)
    if report is not None:
        picture.write_pngs(planned, report)
    if as_json:
        print_json(figures)
        return
    out.print(picture.table(planned))
    out.print("window 0:\n" + picture.drawn(planned.windows[0], max_tokens), markup=False, highlight=False)
    for name, value in figures.items():
        shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if value is not None else "-"
        out.print(f"{name.replace('_', ' ')}: {shown}", markup=False, highlight=False)
