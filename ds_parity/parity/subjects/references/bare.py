"""The bare DeepSpeed engine, and what its references have in common: how a step is written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ds_parity.config import rewrite
from ds_parity.parity.running.layouts import Passes
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects import ulysses
from ds_parity.parity.subjects.oracle import PlannedWindow
from ds_parity.parity.subjects.references.private_state import keep_clip_norm, loss_scale
from ds_parity.planning.rollout import MicroBatch
from ds_parity.trace import StepRecord


def initialize(scenario: Scenario, gradient_accumulation_steps: int | None = None, *, managed: bool = True) -> Any:
    """Return the bare engine of the rewritten configuration.

    Args:
        scenario: what it is for.
        gradient_accumulation_steps: what DeepSpeed is given in place of the configuration's.
        managed: False: the loop says by its calls of step() where boundaries are (`managed_gradient_accumulation`).
    """
    module, mpu = ulysses.placed(scenario)
    plain = rewrite(scenario.config, scenario.ranks).config
    if gradient_accumulation_steps is not None:
        plain.pop("train_batch_size", None)  # DeepSpeed computes it, of all ranks
        plain["gradient_accumulation_steps"] = gradient_accumulation_steps
    if not managed:
        plain["managed_gradient_accumulation"] = False
    engine, *_ = deepspeed.initialize(model=module, config=plain, mpu=mpu, **scenario.keywords(module))
    keep_clip_norm(engine)  # it only keeps what DeepSpeed computes, so that there is a norm to compare on ZeRO 0
    return engine


def metrics_of(batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Return the metrics that every engine of a scenario records: `reward`, the mean over rollouts."""
    rewards = [rollout.reward for batch in batches for unit in batch.held for rollout in unit.sequences]
    return {"reward": math.fsum(rewards) / len(rewards)} if rewards else {}


def _means_of(terms: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return each term's own mean, from its sums and weights on every rank."""
    names = dict.fromkeys(name for one in terms for name in one)
    sums = {name: [sum(one[name][place] for one in terms if name in one) for place in (0, 1)] for name in names}
    return {name: total / units for name, (total, units) in sums.items() if units}


class StepNotes:
    """Gathers over one window what its line in the trace needs.

    The loss is summed as the definition says, sum of weight * loss over ranks and passes, in fp64.
    """

    def __init__(self, engine: Any, scenario: Scenario, passes: Passes) -> None:
        self._engine = engine
        self._settings = scenario.settings
        self._passes = passes
        self._leaves_idle_out = scenario.drive == "uneven"
        self._sharing = scenario.sharing
        self._sum = torch.zeros((), dtype=torch.float64, device="cpu")
        self._terms: dict[str, list[float]] = {}

    def add(self, loss: torch.Tensor, own: float) -> None:
        """Add the undivided loss of a micro-batch of weight `own`.

        With several terms: the sum of what went in, and what the window's losses are divided by.
        """
        summed = self._settings.loss_reduction == "sum" and self._settings.terms is None
        units = 1 if summed else own
        self._sum = self._sum + loss.detach().double().cpu() * units

    def add_term(self, name: str, loss: torch.Tensor, own: float) -> None:
        """Add the undivided loss of a term, in which the micro-batch weighs `own`, to the term's own mean."""
        if not own:
            return
        units = 1 if self._settings.loss_reduction == "sum" else own
        before = self._terms.get(name, [0.0, 0.0])
        self._terms[name] = [before[0] + float(loss.detach().double().cpu()) * units, before[1] + own]

    def record(self, number: int, window: PlannedWindow, lr: list[float], grad_norm: Any, applied: bool) -> StepRecord:
        """Return the step's line; collective, and the next window starts at 0."""
        total, self._sum = self._sum, torch.zeros((), dtype=torch.float64, device="cpu")
        terms, self._terms = [self._terms], {}
        if dist.get_world_size() > 1:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (total, terms[0]))
            # Ranks that share a micro-batch have gathered the same loss of it.
            apart = gathered[:: self._sharing]
            total, terms = torch.stack([one[0] for one in apart]).sum(), [one[1] for one in apart]
        rows = self._passes[window.first : window.last + 1]
        batches = [batch for row in rows for batch in row]
        passes = len(rows)
        if self._leaves_idle_out:
            # Ranks that leave idle passes out come to as many as the busiest of them runs.
            passes = max(sum(not batch.idle for batch in column) for column in zip(*rows, strict=True))
        return StepRecord(
            step=number,
            passes=passes,
            idle_passes=sum(batch.idle for batch in batches) - (len(rows) - passes) * len(rows[0]),
            rollouts=sum(batch.rollouts for batch in batches),
            prompts=sum(batch.prompts for batch in batches),
            tokens=sum(batch.tokens for batch in batches),
            total=window.total,
            loss=float(total) / window.total if window.total else None,
            lr=tuple(float(rate) for rate in lr),
            grad_norm=float(grad_norm) if applied and grad_norm is not None else None,
            loss_scale=loss_scale(self._engine),
            skipped=not applied,
            metrics=metrics_of(batches) | _means_of(terms),
        )
