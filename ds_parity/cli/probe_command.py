"""`ds-parity probe`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_parity.cli.console import out, print_json, progress, verdict
from ds_parity.cli.options import Config, Folder, Json, MaxTokens, Model, Ranks, Rollouts, Seed, Timeout, Tokenizer

if TYPE_CHECKING:
    from ds_parity.parity.probe.start import Probed


def probe(
    config: Config,
    ranks: Ranks = 2,
    seed: Seed = 0,
    subject: Annotated[
        str, typer.Option(help="package.module:function(scenario, record) that runs the window")
    ] = "ds_parity.parity.subjects.candidate:run",
    model: Model = "ds_parity.parity.data.model:build_tiny",
    rollouts: Rollouts = None,
    tokenizer: Tokenizer = None,
    max_tokens: MaxTokens = 256,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="by default 1e-5 in fp32, 2e-2 in bf16 and fp16")
    ] = None,
    timeout: Timeout = 300,
    folder: Folder = Path("ds_parity_out"),
    as_json: Json = False,
) -> None:
    """Measure the coefficient with which each micro-batch entered one step, with idle ranks and without."""
    from ds_parity.config import load_config
    from ds_parity.parity.probe import start

    options = {"seed": seed, "model": model, "rollouts": rollouts, "tokenizer": tokenizer, "max_tokens": max_tokens}
    with progress(start.PROBE_CALLS) as report:
        probed, limit = start.probe_config(
            load_config(config), subject, folder, ranks=ranks, timeout=timeout, progress=report, **options
        )
    limit = limit if tolerance is None else tolerance
    # What is said at the end is of the first window that is wrong, or of the one that errs most.
    worst = max(probed, key=lambda one: (not one.result.within(limit), one.result.beyond))
    right = worst.result.within(limit)
    if as_json:
        windows = [{"data": one.data, "missed": one.missed, **asdict(one.result)} for one in probed]
        print_json({**asdict(worst.result), "tolerance": limit, "right": right, "windows": windows})
    else:
        for one in probed:
            _show_coefficients(one)
        verdict(right, worst.result.said(limit))
    raise typer.Exit(0 if right else 1)


def _show_coefficients(probed: Probed) -> None:
    from ds_parity.parity.report.terminal import coefficients

    result = probed.result
    out.print(f"\na window in which {probed.data}", style="bold", highlight=False)
    if not result.terms:
        out.print(coefficients(result.measured, result.expected))
    for term in result.terms:
        out.print(coefficients(*result.of_term(term), term))
    if probed.missed:
        missed = f"could not be tested: {', '.join(probed.missed)}; nothing is due from there, or its gradient is 0"
        out.print(missed, markup=False, highlight=False, soft_wrap=True)
    if result.alike:
        alike = f"{result.alike} have the gradient of another micro-batch: of those, only the sum was measured"
        out.print(alike, highlight=False)
    out.print(f"unexplained by any combination of the gradients: {result.residual:.2g} of the update", highlight=False)
