"""`ds_parity.trace`: every finished step as a line of a trace, written by the first rank."""

from __future__ import annotations

import hashlib
import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_parity.engine.driver import Driver
from ds_parity.engine.record.finished import Finished
from ds_parity.errors import TraceError
from ds_parity.trace import Header, TraceWriter, end_of_step, read_header

_LOG = logging.getLogger("ds_parity")


def header(scenario: str, seed: int | None, ranks: int, config: dict[str, Any], engine: str) -> Header:
    """Return line 1 of a trace written on this machine."""
    accelerator = get_accelerator()
    canonical = json.dumps(config, sort_keys=True, default=str).encode()
    return Header(
        scenario=scenario,
        seed=seed,
        versions={name: version(name) for name in ("ds_parity", "deepspeed", "torch")},
        device=f"{accelerator.device_name()} {accelerator.communication_backend_name()}",
        ranks=ranks,
        config_hash=hashlib.sha256(canonical).hexdigest(),
        engine=engine,
    )


def attach(driver: Driver, path: str | None, config: dict[str, Any]) -> None:
    """Write every step of `driver` to `path`, if any, on the first rank. Reading its figures waits for the accelerator.

    A trace that stands there is left alone until the first step ends, and then overwritten; where a checkpoint is loaded
    before, it is cut back to the checkpoint's step, and gone on with.

    Raises:
        TraceError: the file can't be made. Later trouble (a full disk) is logged once, and training goes on.
    """
    if path is not None and dist.get_rank() == 0:
        listener = _Listener(Path(path), header("training", None, driver.ranks, config, "ds_parity"))
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
