"""Writing down what an engine did: a trace with the weights in it, on the rank that writes."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_parity.parity.running import weights
from ds_parity.parity.running.scenario import Scenario
from ds_parity.trace import StepRecord, TraceWriter
from ds_parity.trace.heading import header


class Recorder:
    """Takes every step of one engine; the first rank writes.

    Attributes:
        steps: records so far, weights included (the first rank's only).
    """

    def __init__(self, folder: Path, scenario: Scenario, engine: str) -> None:
        self.steps: list[StepRecord] = []
        writes = not dist.is_initialized() or dist.get_rank() == 0
        path = folder / scenario.name / f"{engine}.jsonl"
        ranks = 1 if engine == "torch" else scenario.ranks
        accelerator = get_accelerator()
        device = f"{accelerator.device_name()} {accelerator.communication_backend_name()}"
        line = header(scenario.name, scenario.config, engine=engine, ranks=ranks, device=device, seed=scenario.seed)
        self._writer = TraceWriter(path, line) if writes else None

    def __call__(self, record: StepRecord, module: nn.Module) -> None:
        """Write a step down; every rank calls, because gathering weights is collective under ZeRO 3."""
        vector = weights.vector(module)
        if self._writer is not None:
            record = record.model_copy(update={"weights": weights.summary(vector)})
            self._writer.write(record)
            self.steps.append(record)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
