"""`ds-parity calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_parity.cli.console import out, print_json, progress, verdict
from ds_parity.cli.options import MOST_SEED, Folder, Json, Ranks, Timeout


def calibrate(
    scenarios: Annotated[int, typer.Option(min=1, help="number of random scenarios without a fault")] = 200,
    ranks: Ranks = 2,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="seed of the random scenarios")] = 0,
    timeout: Timeout = 3600,
    folder: Folder = Path("ds_parity_out"),
    as_json: Json = False,
) -> None:
    """Measure how far correct runs differ by rounding, and check that the bounds raise no false alarm."""
    from ds_parity.parity.verification import calibrate as harness

    drawn = harness.drawn(scenarios, seed, ranks)
    with progress(2 * len(drawn)) as report:
        calibration = harness.calibrate(drawn, folder / "calibrate", timeout=timeout, progress=report)
    if as_json:
        keys = ("type", "quantity", "measured", "in_force", "scenarios")
        rows = [dict(zip(keys, row, strict=True)) for row in calibration.table()]
        print_json({"alarms": calibration.alarms, "constants": rows, "accelerator": calibration.accelerator})
    else:
        for dtype, quantity, measured, in_force, count in calibration.table():
            line = f"{dtype:5} {quantity:10} measured {measured:8.4f}, in force {in_force:6.3f}, {count} scenarios"
            out.print(line, markup=False, highlight=False)
        for name in calibration.alarms:
            out.print(f"false alarm: {name}", markup=False, highlight=False)
        out.print(f"ran on: {calibration.accelerator}", markup=False, highlight=False, soft_wrap=True)
        verdict(not calibration.alarms, f"{len(calibration.alarms)} false alarms in {len(drawn)} clean scenarios")
    raise typer.Exit(1 if calibration.alarms else 0)
