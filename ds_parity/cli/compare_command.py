"""`ds-parity compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_parity.cli.console import leave, plain, print_json, show, verdict
from ds_parity.cli.options import TRACES, Json, Junit, Report
from ds_parity.errors import ConfigError


def compare(
    reference: Annotated[Path, typer.Argument(help=f"the trace that is right: {TRACES}", show_default=False)],
    candidate: Annotated[Path, typer.Argument(help="the trace in question: the same", show_default=False)],
    tier: Annotated[
        str | None,
        typer.Option(help="exact or reassociated; by default exact, unless a side is foreign or torch or ranks differ"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp64, fp32, bf16 or fp16: what the runs compute in")] = "fp32",
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="NAME=COLUMN of whichever side is foreign: loss=train/loss, step=_step+1, lr= (none)"
        ),
    ] = None,
    map_reference: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN of the reference alone")] = None,
    map_candidate: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN of the candidate alone")] = None,
    mean_loss: Annotated[
        bool, typer.Option("--mean-loss", help="a foreign loss is the mean over the steps since the one logged before")
    ] = False,
    report: Report = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Compare two traces step by step: ds_parity's own, or what another trainer left behind."""
    from ds_parity.parity import report as reports
    from ds_parity.parity.comparison.bounds import Tier
    from ds_parity.parity.comparison.compare import compare as compared
    from ds_parity.parity.diagnosis import diagnose
    from ds_parity.trace.foreign import open_pair

    reports.check(report, junit)
    if tier not in (None, *[str(known) for known in Tier]):
        raise ConfigError(f"--tier is {tier!r}: it must be {' or '.join(map(str, Tier))}")
    a, b = open_pair(
        reference, candidate, both=maps or (), left=map_reference or (), right=map_candidate or (), mean_loss=mean_loss
    )
    foreign = a.header.foreign or b.header.foreign
    alike = a.header.ranks == b.header.ranks and "torch" not in (a.header.engine, b.header.engine) and not foreign
    chosen = Tier(tier) if tier else (Tier.EXACT if alike else Tier.REASSOCIATED)
    result = compared(a, b, chosen, dtype)
    diagnosis = diagnose(a, b, result)
    if as_json:
        print_json({**plain(result), **diagnosis.plain()})
    else:
        show(result, f"{candidate} against {reference}, {chosen} tier", diagnosis)
        verdict(result.equal, "equal" if result.equal else "the traces differ")
    if report or junit:
        sides = reports.Side(a, str(reference)), reports.Side(b, str(candidate))
        leave(reports.of_traces(result, *sides, diagnosis), report, junit)
    raise typer.Exit(0 if result.equal else 1)
