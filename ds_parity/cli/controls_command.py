"""`ds-parity controls`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from ds_parity.cli.console import out, print_json, progress, verdict
from ds_parity.cli.options import Config, Folder, Json, Timeout


def controls(
    config: Config,
    only: Annotated[list[str] | None, typer.Option("--only", help="a control's name; may be repeated")] = None,
    timeout: Timeout = 900,
    folder: Folder = Path("ds_parity_out"),
    as_json: Json = False,
) -> None:
    """Put known faults into the engine, one at a time: each must be found and named."""
    from ds_parity.config import load_config

    with redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output as it is imported, and that is for results
        from ds_parity.parity.verification import control_runs as harness
    from ds_parity.parity.verification import control_tables

    extended = load_config(config)
    with progress(len(harness.planned_runs(extended, only))) as report:
        findings = harness.run_controls(extended, folder / "controls", names=only, timeout=timeout, progress=report)
    if as_json:
        print_json(
            {
                "good": harness.good(findings),
                "summary": control_tables.summary(findings),
                "findings": control_tables.plain(findings),
            }
        )
    else:
        out.print(control_tables.render(findings))
        for note in control_tables.notes():
            out.print(f"not run: {note}", markup=False, highlight=False, soft_wrap=True)
        verdict(harness.good(findings), control_tables.summary(findings))
    raise typer.Exit(0 if harness.good(findings) else 1)
