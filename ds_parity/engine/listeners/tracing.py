"""`ds_parity.trace`: every finished step as a line of a trace, written by the first rank."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_parity.engine.driver import Driver
from ds_parity.engine.ranks.agreement import Asked
from ds_parity.engine.record.finished import Finished
from ds_parity.errors import TraceError
from ds_parity.sketches import start_of
from ds_parity.trace import Header, Start, TraceWriter, end_of_step, read_header
from ds_parity.trace.heading import header

_LOG = logging.getLogger("ds_parity")
# Weights beyond which a trace does not say where they started: as many take a minute to read.
_MOST = 1_000_000_000
# By the file, whatever the name that it was given by. One that belongs to an engine that is gone is gone, too.
_WRITING: weakref.WeakValueDictionary[str, _Listener] = weakref.WeakValueDictionary()


def refuse_shared(asked: Asked, path: str | None, model: Any) -> None:
    """Raise where another engine of this process may still write to the file; all ranks come here.

    Args:
        asked: all ranks.
        path: `ds_parity.trace` of the engine that is to be made.
        model: what it is to train.

    Raises:
        TraceError: on every rank, because the first one, which writes, would mix the lines of two engines.
    """
    said = None if path is None or dist.get_rank() else _of_another(path, model)
    told = asked.gather(said)[0]
    if told is not None:
        raise TraceError(told)


def start_of_trace(asked: Asked, path: str | None, module: nn.Module) -> Start | None:
    """Return the weights before the first step where the first rank writes a trace; all ranks come here.

    None without a trace, and for models so large that it would take minutes.

    Args:
        asked: all ranks.
        path: `ds_parity.trace` of this rank, which may be another than that of the first.
        module: the model, in the engine.
    """
    large = sum(getattr(one, "ds_numel", one.numel()) for one in module.parameters()) > _MOST
    return start_of(module) if asked.gather(path is not None and not large)[0] else None


def attach(driver: Driver, path: str | None, config: dict[str, Any], start: Start | None = None) -> None:
    """Write every step of `driver` to `path`, if any, on the first rank. Reading its figures waits for the accelerator.

    A trace that stands there is left alone until the first step ends, and then overwritten; where a checkpoint is
    loaded before, it is cut back to the checkpoint's step, and gone on with. One that another engine has written and
    finished is this engine's from now on.

    Args:
        driver: of the engine.
        path: of the file.
        config: the extended configuration.
        start: the weights before the first step.

    Raises:
        TraceError: the file can't be made. Later trouble (a full disk) is logged once, and training goes on.
    """
    if path is not None and dist.get_rank() == 0:
        accelerator = get_accelerator()
        device = f"{accelerator.device_name()} {accelerator.communication_backend_name()}"
        line = header("training", config, engine="ds_parity", ranks=driver.ranks, device=device, start=start)
        # Absolute, because a script may change its folder before its first step.
        listener = _Listener(Path(path).absolute(), line, driver)
        driver.boundary.on_step.append(listener.write)
        driver.on_resume.append(listener.go_on_behind)
        before = _WRITING.get(os.path.realpath(path))
        if before is not None:
            before.give_up()
        _WRITING[os.path.realpath(path)] = listener


def _of_another(path: str, model: Any) -> str | None:
    file = os.path.realpath(path)
    other = _WRITING.get(file)
    if other is None or other.finished:
        return None
    del other
    gc.collect()  # nobody may hold it but a cycle
    other = _WRITING.get(file)
    if other is None or other.finished:
        return None
    return (
        f"ds_parity.trace = {path!r} of the engine over a {type(model).__name__} is the file that another engine of "
        f"this process writes, the one over a {other.model} ({other.path}): a trace has the steps of one engine. "
        "Give each engine a path of its own, or null to all but one; or end the other before: call its finish(), or "
        "let go of it (del)"
    )


def _of_run(line: Header) -> Header:
    """What a header says of the run that is the same where the run goes on."""
    return line.model_copy(update={"start": None})


class _Listener:
    """Writes the steps of one engine.

    Attributes:
        path: of the file.
        model: the class of what the engine trains.
    """

    def __init__(self, path: Path, line: Header, driver: Driver) -> None:
        self.path, self._header = path, line
        self.model = type(driver.engine.module).__name__
        # The engine keeps its listener, and must not be kept by it.
        self._driver = weakref.ref(driver)
        self._writer: TraceWriter | None = None
        self._ended, self._given_up = False, False
        if end_of_step(path, 0) is None:
            self._writer = TraceWriter(path, line)

    @property
    def finished(self) -> bool:
        """Whether the engine is gone, or has ended its run and begun nothing since (`Driver.ended`)."""
        driver = self._driver()
        return driver is None or driver.ended

    def give_up(self) -> None:
        """Leave the file to another engine."""
        if self._writer is not None:
            self._writer.close()
        self._given_up = True

    def write(self, finished: Finished) -> None:
        if self._ended or self._refused():
            return
        try:
            if self._writer is None:
                self._writer = TraceWriter(self.path, self._header)
            self._writer.write(finished.record)
        except TraceError as error:
            _LOG.error("the trace ends here, training goes on: %s", error)
            self._ended = True

    def go_on_behind(self, step: int) -> None:
        if self._refused():
            return
        if self._writer is not None:
            self._writer.close()
        keep = end_of_step(self.path, step)
        if keep is None and self.path.is_file():
            aside = self.path.with_name(f"{self.path.name}.before-{step + 1}")
            try:
                self.path.replace(aside)
            except OSError as error:
                raise TraceError(f"{self.path}: can't be kept as {aside}: {error.strerror or error}") from error
            _LOG.warning(
                "%s ends before step %d, which the checkpoint was saved at: it is kept as %s, and a new trace begins",
                *(self.path, step, aside),
            )
        elif keep is not None and _of_run(read_header(self.path)) != _of_run(self._header):
            _LOG.warning(
                "%s goes on under the header of the run that began it: ranks, versions or configuration differ now",
                self.path,
            )
        # A trace that begins behind a checkpoint does not begin with the weights that the engine was built with.
        self._header = self._header.model_copy(update={"start": None})
        self._writer, self._ended = TraceWriter(self.path, self._header, keep or 0), False

    def _refused(self) -> bool:
        if self._given_up and not self._ended:
            _LOG.error(
                "%s belongs to an engine that was made after this one, over a %s, had finished: its trace ended there, "
                "training goes on; give each engine a path of its own in ds_parity.trace",
                *(self.path, self.model),
            )
            self._ended = True
        return self._given_up
