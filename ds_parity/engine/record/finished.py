"""A finished step, with its numbers left on the device until somebody reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ds_parity.engine.record.metrics import Sums
from ds_parity.trace import Hypothesis, StepRecord
from ds_parity.trace.records import DIVIDED_BY_TRAINER
from ds_parity.window import Window


@dataclass(frozen=True)
class Finished:
    """What one window came to; `record` reads the device, everything else waits for nothing.

    Attributes:
        window: the closed window.
        total: the denominator of the step.
        sums: of the loss and the metrics over ranks and passes, on the device.
        lr: learning rate of each parameter group during the step.
        grad_norm: norm before clipping; None where DeepSpeed computes none.
        loss_scale: fp16 loss scale after the step; None in other precisions.
        skipped: no update was applied.
    """

    window: Window
    total: float
    sums: Sums
    lr: tuple[float, ...]
    grad_norm: Any
    loss_scale: float | None
    skipped: bool

    @cached_property
    def record(self) -> StepRecord:
        """The step as a line of a trace."""
        window = self.window
        loss, metrics = self.sums.read()
        # A mean over ranks and passes, of shares that add up over passes.
        share = metrics.pop(DIVIDED_BY_TRAINER, None)
        supposed = None if share is None else Hypothesis(loss=share * window.passes, grad_norm=None, along=None)
        return StepRecord(
            step=window.index + 1,
            passes=window.passes,
            idle_passes=window.idle_passes,
            rollouts=window.rollouts,
            prompts=window.prompts,
            tokens=window.tokens,
            total=self.total,
            loss=loss / self.total if self.total else None,
            lr=self.lr,
            grad_norm=None if self.grad_norm is None else float(self.grad_norm),
            loss_scale=None if self.loss_scale is None else float(self.loss_scale),
            skipped=self.skipped,
            metrics=metrics,
            hypotheses=None if supposed is None else {DIVIDED_BY_TRAINER: supposed},
        )
