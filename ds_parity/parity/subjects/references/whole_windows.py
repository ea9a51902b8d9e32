"""Reference `torch` of a user's training function: its own loss, on whole windows, without DeepSpeed and in fp64.

A loss that is what the configuration says of it (a mean over tokens or rollouts, or a sum) has the same value on a
window as its micro-batches have together. So this judges how the function divides, and the engine as well. A constant
factor of the loss is here too, unless it is made of the number of ranks, which is 1 here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ds_parity.collation import collate
from ds_parity.errors import ConfigError, WindowError
from ds_parity.parity.running.functions import run_loop
from ds_parity.parity.running.own_batches import Record, begin
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import PlannedWindow, weighs, weights_of_terms, windows_of
from ds_parity.parity.subjects.references.call_order import CallOrder
from ds_parity.parity.subjects.references.torch_steps import TorchSteps, rounded_model
from ds_parity.planning.rollout import MicroBatch


def train_on_whole_windows(scenario: Scenario, record: Record) -> nn.Module:
    """Call the scenario's training function with windows in place of micro-batches.

    Every rank does the same, so that a function may use collectives.

    Raises:
        ConfigError: the function needs more of the engine than plain torch has.
        WindowError: it calls backward() or step() in another order than once for each micro-batch.
    """
    engine = WholeWindows(scenario, record)
    try:
        run_loop(scenario.train or "", engine, engine.passes())
    except WindowError:  # its rule is that of every engine
        raise
    except Exception as error:
        raise ConfigError(
            f"train {scenario.train!r} can't be run on whole windows in plain torch ({type(error).__name__}: {error}): "
            "there it may use engine(...), backward, idle, step, record, device, module and world_size, with tensors "
            "on that device; change it, or verify against deepspeed-loop alone"
        ) from error
    return engine.module


class WholeWindows:
    """Plain torch with the calls of a training function.

    Attributes:
        module: the model, in fp64 on the CPU; its weights start as the engine's do, rounded to its type.
        device: of the model.
        world_size: 1, since a whole window has no other ranks.
    """

    def __init__(self, scenario: Scenario, record: Record) -> None:
        self.module = rounded_model(scenario)
        self.device, self.world_size = torch.device("cpu"), 1
        self._settings, self._record = scenario.settings, record
        self._steps = TorchSteps(scenario, self.module)
        self._batches = scenario.batches()
        self._windows = windows_of(self._batches, self._settings)
        self._order = CallOrder()
        self._loss: torch.Tensor | None = None
        begin(record, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the model has, as DeepSpeed's engine does."""
        return getattr(self.__dict__["module"], name)

    def passes(self, *_: Any, **__: Any) -> Iterator[MicroBatch]:
        """Yield every window as one micro-batch of all ranks and passes."""
        for index, window in enumerate(self._windows):
            self._order.take(index)
            held = self._held(window)
            rollouts = [rollout for batch in held for rollout in batch.held]
            counts = [sum(getattr(one, name) for one in held) for name in ("rollouts", "prompts")]
            yield collate(rollouts, rollouts=counts[0], prompts=counts[1])

    def backward(self, loss: Any, **counts: Any) -> Any:
        """Accumulate the gradient of the window's loss, divided as its micro-batches' would be together."""
        window = self._windows[self._order.run()]
        if window.total:
            divided = self._divided(loss, window)
            divided.backward()
            self._loss = divided.detach()
        return loss

    def idle(self, loss: Any) -> Any:
        """No window is idle."""
        return loss

    def step(self, *_: Any) -> None:
        """Update the weights, move the scheduler, and write down."""
        index, loss, self._loss = self._order.end(), self._loss, None
        window = self._windows[index]
        line = self._steps.step(index + 1, window, self._held(window), loss)
        self._record(line, self.module)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Every window ends with its one pass."""
        return True

    def expect(self, **_: Any) -> None:
        """All counts are known here."""

    def record(self, *_: Any) -> None:
        """Metrics of a training function are its own."""

    def finish(self) -> None:
        """Every window was settled by its step."""

    def _held(self, window: PlannedWindow) -> list[MicroBatch]:
        return [batch for row in self._batches[window.first : window.last + 1] for batch in row]

    def _divided(self, loss: Any, window: PlannedWindow) -> Any:
        held, summed = self._held(window), self._settings.loss_reduction == "sum"
        if not isinstance(loss, Mapping):
            units = 1.0 if summed else sum(weighs(batch, self._settings) for batch in held)
            return loss * (units / window.total)
        combined: Any = torch.zeros((), dtype=torch.float64, device="cpu")
        for name, term in (self._settings.terms or {}).items():
            units = sum(weights_of_terms(batch, self._settings)[name] for batch in held)
            total = window.totals[name]
            if units and total:
                combined = combined + loss[name] * (term.coefficient * (1.0 if summed else units) / total)
        return combined
