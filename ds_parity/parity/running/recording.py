"""Writing down what an engine did: a trace with the weights in it, on the rank that writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_parity.parity.running import weights
from ds_parity.parity.running.scenario import Scenario
from ds_parity.sketches import sketch_of, start_of
from ds_parity.trace import Start, StepRecord, TraceWriter
from ds_parity.trace.heading import header


class Recorder:
    """Takes the start and every step of one engine; the first rank writes.

    Attributes:
        steps: records so far, weights included (the first rank's only).
        taken: how many steps there were, on every rank.
        sketch: takes a vector of all weights, (n,), and returns what the trace tells of it: a reference states
            hypotheses by it. None: there shall be none.
    """

    def __init__(self, folder: Path, scenario: Scenario, engine: str, hypotheses: bool = True) -> None:
        self.steps: list[StepRecord] = []
        self.taken = 0
        self.sketch: Callable[[Tensor], tuple[float, ...]] | None = _sketch if hypotheses else None
        self._writes = not dist.is_initialized() or dist.get_rank() == 0
        self._path = folder / scenario.name / f"{engine}.jsonl"
        self._scenario, self._engine = scenario, engine
        self._writer: TraceWriter | None = None

    def begin(self, module: nn.Module) -> None:
        """Write the header with the weights before the first step; every rank calls, as for a step."""
        self._head(start_of(module))

    def __call__(self, record: StepRecord, module: nn.Module) -> None:
        """Write a step down; every rank calls, because gathering weights is collective under ZeRO."""
        self.taken += 1
        vector = weights.trained(module)
        writer = self._head(None)
        if writer is not None:
            record = record.model_copy(update={"weights": weights.summary(vector)})
            writer.write(record)
            self.steps.append(record)

    def _head(self, start: Start | None) -> TraceWriter | None:
        """Write the header, unless it is written; None on ranks that write nothing."""
        if self._writes and self._writer is None:
            scenario, accelerator = self._scenario, get_accelerator()
            line = header(
                scenario.name,
                scenario.config,
                engine=self._engine,
                ranks=1 if self._engine == "torch" else scenario.ranks,
                device=f"{accelerator.device_name()} {accelerator.communication_backend_name()}",
                seed=scenario.seed,
                start=start,
            )
            self._writer = TraceWriter(self._path, line)
        return self._writer

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        writer = self._head(None)
        if writer is not None:
            writer.close()


def _sketch(vector: Tensor) -> tuple[float, ...]:
    return sketch_of([vector])
