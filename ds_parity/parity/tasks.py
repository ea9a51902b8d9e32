"""What the ranks can be asked to do: functions of plain values that return plain values, found by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_parity.parity import candidate
from ds_parity.parity.candidate import Record
from ds_parity.parity.controls import mean_of_micro_batches
from ds_parity.parity.recording import Recorder
from ds_parity.parity.references import alone, fixed, loop
from ds_parity.parity.scenario import Scenario

ENGINES: dict[str, Callable[[Scenario, Record], Any]] = {
    "ds_parity": candidate.run,
    "deepspeed": fixed.run,
    "deepspeed-loop": loop.run,
    "torch": alone.run,
    "mean-of-micro-batches": mean_of_micro_batches.run,
}


def run_scenario(scenario: dict[str, Any], engine: str, folder: str) -> dict[str, Any]:
    """Run one scenario with one engine; the trace lies at `folder`/scenario name/`engine`.jsonl."""
    wanted = Scenario.from_json(scenario)
    if engine == "torch":
        if dist.get_rank() == 0:
            with Recorder(Path(folder), wanted, engine) as recorder:
                ENGINES[engine](wanted, recorder)
        dist.barrier()
    else:
        with Recorder(Path(folder), wanted, engine) as recorder:
            ran = ENGINES[engine](wanted, recorder)
        ran.destroy()
        del ran
    gc.collect()
    return {"scenario": wanted.name, "engine": engine}
