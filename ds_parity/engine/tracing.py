"""`ds_parity.trace`: every finished step as a line of a trace, written by the first rank."""

from __future__ import annotations

import hashlib
import json
import logging
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_parity.engine.driver import Driver
from ds_parity.engine.finished import Finished
from ds_parity.errors import TraceError
from ds_parity.trace import Header, TraceWriter

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

    Raises:
        TraceError: the file can't be made. Later trouble (a full disk) is logged once, and training goes on.
    """
    if path is not None and dist.get_rank() == 0:
        writer = TraceWriter(path, header("training", None, driver.ranks, config, "ds_parity"))
        driver.on_step.append(_Listener(writer))


class _Listener:
    def __init__(self, writer: TraceWriter) -> None:
        self._writer: TraceWriter | None = writer

    def __call__(self, finished: Finished) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(finished.record)
        except TraceError as error:
            _LOG.error("the trace ends here, training goes on: %s", error)
            self._writer = None
