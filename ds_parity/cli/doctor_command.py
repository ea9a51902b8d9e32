"""`ds-parity doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ds_parity.cli.console import out, print_json, progress, verdict
from ds_parity.cli.options import Json, Ranks

if TYPE_CHECKING:
    from ds_parity.parity.doctor import Examination, Finding

_MARKS = {"fine": ("ok", "green"), "bites": ("BITES", "bold red"), "perhaps": ("if", "yellow"), "unknown": ("?", "red")}
_VERDICTS = (
    "nothing bites",
    "something bites: see the lines that say BITES",
    "there is no verdict: see the lines with ?",
)


def doctor(
    config: Annotated[
        str | None, typer.Argument(help="DeepSpeed JSON, extended or plain: a path, or base64", show_default=False)
    ] = None,
    ranks: Ranks = 2,
    build: Annotated[bool, typer.Option("--build", help="compile DeepSpeed's operators now")] = False,
    as_json: Json = False,
) -> None:
    """Look at the installation and the machine, and at DeepSpeed's known faults that a configuration meets."""
    from ds_parity.config import load_config, refuse_misspelt
    from ds_parity.parity.doctor import examine

    plain = None if config is None else load_config(config)
    if plain is not None:
        refuse_misspelt(plain)
    with progress(4) as bar:
        examination = examine(plain, ranks=ranks, build=build, progress=bar)
    if as_json:
        print_json({"code": examination.code, "verdict": _VERDICTS[examination.code], **asdict(examination)})
    else:
        _print(examination)
    raise typer.Exit(examination.code)


def _print(examination: Examination) -> None:
    for finding in examination.installation:
        _line(finding, finding.said)
    if examination.refused:
        out.print("\nds_parity.initialize refuses this configuration:", style="bold")
    for finding in examination.refused:
        _line(finding, finding.said)
    if examination.faults:
        out.print("\nDeepSpeed's known faults that this configuration meets:", style="bold")
    for finding in examination.faults:
        issue = f" ({finding.name})" if "#" in finding.name else ""
        _line(finding, f"{finding.script}{issue}: {finding.said}")
    verdict(examination.code == 0, _VERDICTS[examination.code])


def _line(finding: Finding, said: str) -> None:
    mark, style = _MARKS[finding.state]
    out.print(f"{mark:>5}", style=style, end=" ", highlight=False)
    out.print(said, markup=False, highlight=False, soft_wrap=True)
    if finding.way_out and finding.state != "fine":
        out.print(f"      -> {finding.way_out}", markup=False, highlight=False, soft_wrap=True)
