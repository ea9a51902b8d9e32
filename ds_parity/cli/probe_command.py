"""`ds-parity probe`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_parity.cli.console import out, print_json, progress, verdict
from ds_parity.cli.options import Config, Folder, Json, MaxTokens, Model, Ranks, Rollouts, Seed, Timeout

if TYPE_CHECKING:
    from ds_parity.parity.probe.decomposition import ProbeResult


def probe(
    config: Config,
    ranks: Ranks = 2,
    seed: Seed = 0,
    subject: Annotated[
        str, typer.Option(help="package.module:function(scenario, record) that runs the window")
    ] = "ds_parity.parity.subjects.candidate:run",
    model: Model = "ds_parity.parity.data.model:build_tiny",
    rollouts: Rollouts = None,
    max_tokens: MaxTokens = 256,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="by default 1e-5 in fp32, 2e-2 in bf16 and fp16")
    ] = None,
    timeout: Timeout = 300,
    folder: Folder = Path("ds_parity_out"),
    as_json: Json = False,
) -> None:
    """Measure the coefficient with which each micro-batch of each rank entered one step."""
    from ds_parity.config import load_config
    from ds_parity.parity.probe import start

    options = {"seed": seed, "model": model, "rollouts": rollouts, "max_tokens": max_tokens}
    with progress(1) as report:
        result, limit = start.probe_config(
            load_config(config), subject, folder, ranks=ranks, timeout=timeout, progress=report, **options
        )
    limit = limit if tolerance is None else tolerance
    right = result.within(limit)
    if as_json:
        print_json({**asdict(result), "tolerance": limit, "right": right})
    else:
        _show_coefficients(result)
        verdict(right, result.said(limit))
    raise typer.Exit(0 if right else 1)


def _show_coefficients(result: ProbeResult) -> None:
    from ds_parity.parity.report.terminal import coefficients

    if not result.terms:
        out.print(coefficients(result.measured, result.expected))
    for term in result.terms:
        out.print(coefficients(*result.of_term(term), term))
    if result.alike:
        alike = f"{result.alike} have the gradient of another micro-batch: of those, only the sum was measured"
        out.print(alike, highlight=False)
    out.print(f"unexplained by any combination of the gradients: {result.residual:.2g} of the update", highlight=False)
