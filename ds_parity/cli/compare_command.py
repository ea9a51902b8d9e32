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
    candidate: Annotated[Path, typer.Argument(help="the trace to check: the same kinds of file", show_default=False)],
    tier: Annotated[
        str | None,
        typer.Option(
            help="exact or reassociated; by default what the headers imply: exact for one engine, one setting"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp64, fp32, bf16 or fp16: what the runs compute in; by default by the headers, else fp32"),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", help="NAME=COLUMN of files of other trainers: loss=train/loss, step=_step+1, lr= (none)"),
    ] = None,
    map_reference: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN, for the reference only")] = None,
    map_candidate: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN, for the candidate only")] = None,
    mean_loss: Annotated[
        bool,
        typer.Option(
            "--mean-loss", help="another trainer's loss is the mean over all steps since the last logged step"
        ),
    ] = False,
    report: Report = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Compare two runs step by step: traces of ds_parity, or files of other trainers."""
    from ds_parity.parity import report as reports
    from ds_parity.parity.comparison.bounds import Tier
    from ds_parity.parity.comparison.compare import compare as compared
    from ds_parity.parity.comparison.implied import cut_otherwise, implied
    from ds_parity.parity.comparison.verdicts import verdict_of, within_rounding
    from ds_parity.parity.diagnosis import NOTHING, diagnose
    from ds_parity.trace.foreign import open_pair

    reports.check(report, junit)
    if tier not in (None, *[str(known) for known in Tier]):
        raise ConfigError(f"--tier is {tier!r}: it must be {' or '.join(map(str, Tier))}")
    a, b = open_pair(
        reference, candidate, both=maps or (), left=map_reference or (), right=map_candidate or (), mean_loss=mean_loss
    )
    given = implied(a.header, b.header)
    kind = given.dtype if dtype is None else dtype
    result = compared(a, b, Tier(tier) if tier else given.tier, kind)
    if not tier and (cut := cut_otherwise(given, result)) is not given:
        given, result = cut, compared(a, b, cut.tier, kind)
    chosen, why = result.tier, "asked for" if tier else f"implied by the traces: {given.because}"
    rounding = within_rounding(result, lambda: compared(a, b, Tier.REASSOCIATED, kind))
    diagnosis = NOTHING if rounding is not None else diagnose(a, b, result)
    words = verdict_of(result, rounding)
    if as_json:
        more = {"verdict": words, "within_rounding": result.equal or rounding is not None, "tier_because": why}
        print_json({**plain(result), **more, **diagnosis.plain()})
    else:
        show(result, f"{candidate} against {reference}, {chosen} tier ({why})", diagnosis)
        verdict(result.equal, words)
    if report or junit:
        sides = reports.Side(a, str(reference)), reports.Side(b, str(candidate))
        leave(reports.of_traces(result, *sides, diagnosis), report, junit)
    raise typer.Exit(0 if result.equal else 1)
