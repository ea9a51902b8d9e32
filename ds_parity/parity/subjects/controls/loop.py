"""The bare engine driven by hand, and right: every decision is a method, and a control overrides one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ds_parity.config.settings import TermSettings
from ds_parity.parity.running.layouts import Passes
from ds_parity.parity.running.own_batches import Record, begin, own_batches, own_rank, stand_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import PlannedWindow, given_share, weighs, weights_of_terms, windows_of
from ds_parity.parity.subjects.references.bare import StepNotes, initialize, metrics_of
from ds_parity.parity.subjects.references.private_state import averages_over_ranks
from ds_parity.parity.subjects.references.torch_counterparts import ByHand
from ds_parity.planning.rollout import MicroBatch


class Loop:
    """A training loop that knows all counts beforehand, so that every loss is divided by its window's actual total.

    Attributes:
        name: of the fault, as people look it up.
        seen: where it was seen.
        scenario: in which of `control_scenarios.py` it shows.
        stages: of ZeRO on which it is a fault.
        like: faults whose traces look the same, in which case any of them is a right diagnosis.
        accumulation_steps: what DeepSpeed is given as gradient_accumulation_steps, None: the configuration's.
        rank: this one, among those that hold different micro-batches.
        window: the window that is being run.
        number: of the window, from 1.
    """

    name: ClassVar[str] = ""
    seen: ClassVar[str] = ""
    scenario: ClassVar[str] = "tokens"
    stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    like: ClassVar[tuple[str, ...]] = ()
    accumulation_steps: ClassVar[int | None] = None

    def __init__(self, wanted: Scenario) -> None:
        self.wanted, self.settings = wanted, wanted.settings
        self.passes, self.rank = self.batches(), own_rank(wanted)
        self.own = own_batches(wanted, self.passes)
        self.idle = stand_in(wanted)
        self.engine: Any = initialize(self.of_engine(), self.accumulation_steps)
        self.scheduler, self.engine.lr_scheduler = self.engine.lr_scheduler, None
        self.by_hand = ByHand(self.scheduler) if self.settings.lr_progress == "rollout" and self.scheduler else None
        self.notes = StepNotes(self.engine, wanted, self.passes)
        self.window: PlannedWindow
        self.number = 0

    @classmethod
    def run(cls, wanted: Scenario, record: Record) -> Any:
        """Run the scenario with the fault, and hand every step to `record`; returns the engine."""
        loop = cls(wanted)
        begin(record, loop.engine.module)
        for number, window in enumerate(loop.windows(), start=1):
            loop.window, loop.number = window, number
            for index in range(window.first, window.last + 1):
                loop.engine.set_gradient_accumulation_boundary(loop.marks(index))
                loop.backward(index)
                if index < window.last:
                    loop.between(index)
            loop.close(number, record)
        return loop.engine

    # What a control may get wrong.

    def batches(self) -> Passes:
        """Return the micro-batches of all ranks, pass by pass."""
        return self.wanted.batches()

    def of_engine(self) -> Scenario:
        """Return what the engine and its model are built from."""
        return self.wanted

    def windows(self) -> list[PlannedWindow]:
        """Return which passes make a step, and what its losses are divided by."""
        return windows_of(self.passes, self.settings, lookahead=True)

    def marks(self, index: int) -> bool:
        """Whether this pass is announced to DeepSpeed as the boundary, before its backward."""
        return index == self.window.last and self.window.total > 0

    def total(self, index: int) -> float:
        """Return what the loss of a pass is divided by."""
        return self.window.total

    def units(self, batch: MicroBatch) -> float:
        """Return what a micro-batch's mean loss weighs."""
        return weighs(batch, self.settings)

    def total_of_term(self, name: str) -> float:
        """Return what the mean of a term of the loss is divided by."""
        return self.window.totals[name]

    def averaged(self) -> float:
        """Return what DeepSpeed divides the sum over ranks by, less what ranks of a group add up too often."""
        ranks = self.wanted.ranks if averages_over_ranks(self.engine) else 1
        beyond = self.wanted.sequence_parallel if self.engine.zero_optimization_stage() < 3 else 1
        return ranks / beyond

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        """Return the loss of a micro-batch as it is accumulated."""
        if self.settings.terms is not None:
            return loss * self.averaged()  # each term was divided by its own total
        return loss * (self.units(batch) * self.averaged() / self.total(index))

    def silenced(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of an idle pass, or of one that weighs nothing, as it is accumulated."""
        return loss * 0.0

    def noted(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> tuple[torch.Tensor, float]:
        """Return the loss of a micro-batch for the trace, and what it weighs there."""
        return loss, self.window.total if self.settings.terms is not None else self.units(batch)

    def loss(self, reported: float) -> float:
        """Return the step's loss as it is written to the trace."""
        return reported

    def metrics(self, batches: list[MicroBatch]) -> dict[str, float]:
        """Return the step's metrics from the micro-batches of all ranks and passes."""
        return metrics_of(batches)

    def between(self, index: int) -> None:
        """Run what follows a pass that is not the last."""
        self.engine.step()

    def move(self, applied: bool) -> None:
        """Move the scheduler after a window."""
        if self.by_hand is not None:
            self.by_hand.advance(self.window.progress, applied)
        elif self.scheduler is not None and applied:
            self.scheduler.step()

    # What none gets wrong.

    @property
    def rows(self) -> Passes:
        """The passes of the window."""
        return self.passes[self.window.first : self.window.last + 1]

    def an_even_share(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch as if each of the window weighed the same."""
        return loss * (self.averaged() / sum(not batch.idle for row in self.rows for batch in row))

    def configured(self, **changed: Any) -> Scenario:
        """Return the scenario with some keys of its configuration changed."""
        return replace(self.wanted, config={**self.wanted.config, **changed})

    def inputs(self, index: int) -> MicroBatch:
        """Return what a pass runs on this rank."""
        return self.idle if self.own[index].idle else self.own[index]

    def backward(self, index: int) -> None:
        """Run one pass of this rank."""
        batch = self.own[index]
        loss = self.engine(**self.inputs(index).inputs)
        if self.settings.terms is not None:
            loss = self.of_terms(loss, batch, self.settings.terms)
        if self.units(batch) == 0:
            self.engine.backward(self.silenced(loss, index), scale_wrt_gas=False)
            return
        if self.window.divided_by is not None:
            loss = loss * given_share(batch, self.window)
        self.notes.add(*self.noted(loss, batch, index))
        self.engine.backward(self.divided(loss, batch, index), scale_wrt_gas=False)

    def of_terms(
        self, losses: Mapping[str, torch.Tensor], batch: MicroBatch, terms: Mapping[str, TermSettings]
    ) -> torch.Tensor:
        """Return what a micro-batch adds to the step's loss: coefficient * weight * loss / total, over its terms."""
        added = torch.zeros((), device=self.engine.device)
        for name, units in weights_of_terms(batch, self.settings).items():
            own = 1 if self.settings.loss_reduction == "sum" else units
            added = added + losses[name] * (terms[name].coefficient * own / self.total_of_term(name) if units else 0.0)
            self.notes.add_term(name, losses[name], units)
        return added

    def close(self, number: int, record: Record) -> None:
        """Step, move the scheduler, write down."""
        engine, lr = self.engine, self.engine.get_lr()
        engine.step()
        applied = bool(self.window.total) and engine.was_step_applied()
        norm = engine.get_global_grad_norm() if applied else None
        self.move(applied)
        line = self.notes.record(number, self.window, lr, norm, applied)
        batches = [batch for row in self.rows for batch in row]
        reported = None if line.loss is None else self.loss(line.loss)
        means = {name: line.metrics[name] for name in self.settings.terms or () if name in line.metrics}
        update = {"loss": reported, "metrics": means | self.metrics(batches)}
        record(line.model_copy(update=update), engine.module)
