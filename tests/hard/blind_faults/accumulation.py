"""Faults of what is accumulated, and of where a step's boundary lies."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ds_parity.parity.subjects.oracle import PlannedWindow
from ds_parity.planning.rollout import MicroBatch
from tests.hard.blind_faults.base import Fault, accumulated


class FirstPassLost(Fault):
    name = "first-pass-lost"
    truth = "zero_grad() is called after the first backward of a window: the gradient of its first pass is lost."
    kind = "gradient"

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        kept = index > self.window.first or len(self.rows) == 1
        return super().divided(loss, batch, index) * float(kept)


class OnlyLastPasses(Fault):
    name = "only-the-second-half-counts"
    truth = "Gradients are overwritten in the middle of each window: only its second half reaches the step."
    kind = "gradient"

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        kept = 2 * (index - self.window.first) + 1 >= len(self.rows)
        return super().divided(loss, batch, index) * float(kept)


class LastPassLost(Fault):
    name = "last-pass-lost"
    truth = "The step is taken before the last backward of the window, whose gradient is then thrown away."
    kind = "gradient"

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        kept = index < self.window.last or len(self.rows) == 1
        return super().divided(loss, batch, index) * float(kept)


class PassTwice(Fault):
    name = "first-micro-batch-twice"
    truth = "The first micro-batch of each window is run backward twice, as after a retry: its gradient counts double."
    kind = "gradient"

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        first = next(at for at, row in enumerate(self.rows) if not all(one.idle for one in row))
        twice = index - self.window.first == first
        return super().divided(loss, batch, index) * (2.0 if twice else 1.0)


class NeverZeroed(Fault):
    name = "gradients-never-zeroed"
    truth = "Gradients are not zeroed after a step: each step also contains those of all steps before it."
    kind = "gradient"
    stages = (0, 1, 2)

    left: list[Tensor] | None = None

    def before_step(self) -> None:
        own = accumulated(self.engine)
        for one, before in zip(own, self.left or [], strict=False):
            one.add_(before)
        self.left = [one.detach().clone() for one in own]


class GradientOneStepLate(Fault):
    name = "gradient-one-step-late"
    truth = "Each step uses the gradient of the window before it; the first step uses its own."
    kind = "gradient"
    stages = (0, 1, 2)

    left: list[Tensor] | None = None

    def before_step(self) -> None:
        own = accumulated(self.engine)
        kept = [one.detach().clone() for one in own]
        for one, before in zip(own, self.left or [], strict=False):
            one.copy_(before)
        self.left = kept


class AccumulatedInBf16(Fault):
    name = "accumulated-in-bf16"
    truth = "Gradients are accumulated in bf16."
    kind = "gradient"
    stages = (1, 2)

    def backward(self, index: int) -> None:
        super().backward(index)
        held = [*self.engine.optimizer.all_grad_tensors.values(), accumulated(self.engine)]
        for one in (one for part in held if part is not None for one in part if one is not None):
            one.copy_(one.bfloat16())


class RankStopsEarly(Fault):
    name = "rank-stops-before-the-last-pass"
    truth = "Rank 1 leaves the loop one micro-batch early in every window: its last one is not trained on."
    kind = "gradient"

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        own = [at for at, row in enumerate(self.rows) if not row[1].idle]
        dropped = self.rank == 1 and len(own) > 1 and index - self.window.first == own[-1]
        return super().divided(loss, batch, index) * (0.0 if dropped else 1.0)


class BoundaryOnePassLate(Fault):
    name = "boundary-one-pass-late"
    truth = "Every step is taken one pass too late, and so holds a pass of the next window and lacks one of its own."
    kind = "data"
    scenario = "uniform"

    def windows(self) -> list[PlannedWindow]:
        planned, last = super().windows(), len(self.passes) - 1
        return [
            replace(one, first=one.first + (at > 0), last=min(one.last + 1, last)) for at, one in enumerate(planned)
        ]


class EverySecondBoundary(Fault):
    name = "two-windows-in-one-step"
    truth = "A step is taken at every second boundary only, and is divided by the tokens of both windows."
    kind = "data"

    def windows(self) -> list[PlannedWindow]:
        planned = super().windows()
        pairs = [planned[at : at + 2] for at in range(0, len(planned), 2)]
        return [
            replace(pair[-1], first=pair[0].first, total=sum(one.total for one in pair), expected=pair[-1].expected)
            for pair in pairs
        ]


class WindowInTwoSteps(Fault):
    name = "third-window-in-two-steps"
    truth = "The third window is trained on in two steps, because the loop was interrupted in its middle."
    kind = "data"

    def windows(self) -> list[PlannedWindow]:
        made: list[PlannedWindow] = []
        for number, one in enumerate(super().windows(), start=1):
            rows = self.passes[one.first : one.last + 1]
            weights = [sum(self.units(batch) for batch in row) for row in rows]
            half = next((at for at in range(1, len(rows)) if any(weights[:at]) and any(weights[at:])), None)
            if number != 3 or half is None:
                made.append(one)
                continue
            made.append(replace(one, last=one.first + half - 1, total=float(sum(weights[:half]))))
            made.append(replace(one, first=one.first + half, total=float(sum(weights[half:]))))
        return made


class EverySecondPassLost(Fault):
    name = "every-second-pass-without-gradient"
    truth = "Every second pass is run without gradients, as if it were an evaluation."
    kind = "gradient"

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        kept = (index - self.window.first) % 2 == 0 or len(self.rows) == 1
        return super().divided(loss, batch, index) * float(kept)
