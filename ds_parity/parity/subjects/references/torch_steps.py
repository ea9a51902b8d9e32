"""The steps of a reference in plain torch: model, optimizer, scheduler, and the line that a trace keeps of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import PlannedWindow
from ds_parity.parity.subjects.references.torch_counterparts import ByHand, clipped_step, optimizer_and_scheduler
from ds_parity.planning.rollout import MicroBatch
from ds_parity.trace import StepRecord


def rounded_model(scenario: Scenario) -> nn.Module:
    """Return the scenario's model in fp64; its weights start as the engine's do, rounded to its type."""
    model = scenario.build()
    return {"bf16": model.bfloat16, "fp16": model.half}.get(scenario.storage, model.float)().double()


class TorchSteps:
    """Takes the steps of a model; each ends a window whose gradient is whole.

    Args:
        scenario: says which optimizer, scheduler and clipping.
        model: the one that is trained.

    Attributes:
        optimizer: torch's own.
    """

    def __init__(self, scenario: Scenario, model: nn.Module) -> None:
        self._scenario, self._model = scenario, model
        self.optimizer, self._scheduler = optimizer_and_scheduler(scenario, model)
        by_rollouts = self._scheduler is not None and scenario.settings.lr_progress == "rollout"
        self._by_hand = ByHand(self._scheduler) if by_rollouts else None

    def step(
        self, number: int, window: PlannedWindow, held: Sequence[MicroBatch], loss: torch.Tensor | None
    ) -> StepRecord:
        """Update the weights, clear their gradients, and move the scheduler; both stay where a gradient is not finite.

        Args:
            number: of the step (>= 1).
            window: what the step is of.
            held: its micro-batches.
            loss: the step's; None where the window has none, and no step is applied.
        """
        applied = loss is not None and self._is_finite()
        lr = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        norm = clipped_step(self._model, self.optimizer, self._scenario) if applied else None
        self.optimizer.zero_grad()
        if self._by_hand is not None:
            self._by_hand.advance(window.progress, applied)
        elif self._scheduler is not None and applied:
            self._scheduler.step()
        return StepRecord(
            step=number,
            passes=1,
            idle_passes=0,
            rollouts=sum(batch.rollouts for batch in held),
            prompts=sum(batch.prompts for batch in held),
            tokens=sum(batch.tokens for batch in held),
            total=window.total,
            loss=None if loss is None else float(loss.detach()),
            lr=lr,
            grad_norm=norm,
            skipped=not applied,
        )

    def _is_finite(self) -> bool:
        gradients = (one.grad for one in self._model.parameters() if one.grad is not None)
        return all(bool(gradient.isfinite().all()) for gradient in gradients)
