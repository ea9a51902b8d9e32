"""`ds_parity.trace`: every finished step as a line of a trace, written by the first rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_parity.engine.driver import Driver
from ds_parity.engine.record.finished import Finished
from ds_parity.errors import TraceError
from ds_parity.trace import Header, TraceWriter, end_of_step, read_header
from ds_parity.trace.heading import header

_LOG = logging.getLogger("ds_parity")


def attach(driver: Driver, path: str | None, config: dict[str, Any]) -> None:
    """Write every step of `driver` to `path`, if any, on the first rank. Reading its figures waits for the accelerator.

    A trace that stands there is left alone until the first step ends, and then overwritten; where a checkpoint is
    loaded before, it is cut back to the checkpoint's step, and gone on with.

    Raises:
        TraceError: the file can't be made. Later trouble (a full disk) is logged once, and training goes on.
    """
    if path is not None and dist.get_rank() == 0:
        accelerator = get_accelerator()
        device = f"{accelerator.device_name()} {accelerator.communication_backend_name()}"
        line = header("training", config, engine="ds_parity", ranks=driver.ranks, device=device)
        listener = _Listener(Path(path), line)
        driver.boundary.on_step.append(listener.write)
        driver.on_resume.append(listener.go_on_behind)


class _Listener:
    def __init__(self, path: Path, line: Header) -> None:
        self._path, self._header = path, line
        self._writer: TraceWriter | None = None
        self._ended = False
        if end_of_step(path, 0) is None:
            self._writer = TraceWriter(path, line)

    def write(self, finished: Finished) -> None:
        if self._ended:
            return
        try:
            if self._writer is None:
                self._writer = TraceWriter(self._path, self._header)
            self._writer.write(finished.record)
        except TraceError as error:
            _LOG.error("the trace ends here, training goes on: %s", error)
            self._ended = True

    def go_on_behind(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()
        keep = end_of_step(self._path, step)
        if keep is None:
            aside = self._path.with_name(f"{self._path.name}.before-{step + 1}")
            self._path.replace(aside)
            _LOG.warning(
                "%s ends before step %d, which the checkpoint was saved at: it is kept as %s, and a new trace begins",
                *(self._path, step, aside),
            )
        elif read_header(self._path) != self._header:
            _LOG.warning(
                "%s goes on under the header of the run that began it: ranks, versions or configuration differ now",
                self._path,
            )
        self._writer, self._ended = TraceWriter(self._path, self._header, keep or 0), False
