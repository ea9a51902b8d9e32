"""Faults of clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_parity.parity.running.scenario import Scenario
from ds_parity.planning.rollout import MicroBatch
from tests.hard.blind_faults.base import Fault, accumulated


class _Clipping(Fault):
    scenario = "clipped"
    kind = "clipping"

    @property
    def limit(self) -> float:
        return float(self.wanted.config["gradient_clipping"])


class AnotherLimit(_Clipping):
    name = "clip-at-another-limit"
    truth = "The gradient is clipped at twice the limit."

    def of_engine(self) -> Scenario:
        return self.configured(gradient_clipping=2 * self.limit)


class LimitOverRanks(_Clipping):
    name = "clip-limit-divided-by-ranks"
    truth = "The clipping limit is divided by the number of ranks."

    def of_engine(self) -> Scenario:
        return self.configured(gradient_clipping=self.limit / self.wanted.ranks)


class SquareRootOfLimit(_Clipping):
    name = "clip-limit-compared-with-the-squared-norm"
    truth = "The limit is compared with the square of the norm: gradients are clipped at the limit's square root."

    def of_engine(self) -> Scenario:
        return self.configured(gradient_clipping=math.sqrt(self.limit))


class Off(_Clipping):
    name = "clipping-off"
    truth = "The gradient is not clipped."

    def of_engine(self) -> Scenario:
        return self.configured(gradient_clipping=1e9)  # out of reach; at 0, ZeRO 0 would not compute a norm


class _OwnClip(_Clipping):
    """The accumulated gradient is clipped here, and by DeepSpeed at a limit that none reaches."""

    stages = (1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.engine.optimizer.unscale_and_clip_grads = self.clip

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        raise NotImplementedError

    def factor(self, norm: Tensor | float) -> float:
        """Return what a gradient of this norm is multiplied by."""
        return min(1.0, self.limit / (float(norm) + 1e-6))


class ByValue(_OwnClip):
    name = "clip-by-value"
    truth = "Each element of the gradient is clipped to 0.005, in place of the whole by its norm."

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        for one in gradients:
            one.clamp_(-0.005, 0.005)


class ByShard(_OwnClip):
    name = "clip-by-the-norm-of-a-shard"
    truth = "Each rank clips its shard of the gradient by the norm of that shard alone."

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        own = torch.stack([one.norm() for one in gradients]).norm()
        for one in gradients:
            one.mul_(self.factor(own))


class Twice(_OwnClip):
    name = "clip-factor-applied-twice"
    truth = "The clipping factor is applied twice."

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        for one in gradients:
            one.mul_(self.factor(norm) ** 2)


class LateClip(_OwnClip):
    name = "clipping-from-the-third-step"
    truth = "The first two steps are not clipped."

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        for one in gradients:
            one.mul_(self.factor(norm) if self.number > 2 else 1.0)


class ByTheNormBefore(_OwnClip):
    name = "clip-by-the-norm-of-the-step-before"
    truth = "The clipping factor of a step is computed from the gradient norm of the step before it."

    last: Tensor | None = None

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        before, self.last = self.last, norm
        for one in gradients:
            one.mul_(self.factor(norm if before is None else before))


class ByMaximum(_OwnClip):
    name = "clip-by-the-largest-element"
    truth = "The gradient is clipped by its largest element (the infinity norm), at the same limit."

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        largest = torch.stack([one.abs().max() for one in gradients]).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        for one in gradients:
            one.mul_(min(1.0, 0.1 * self.limit / (float(largest) + 1e-6)))


class Always(_OwnClip):
    name = "gradient-normalised-always"
    truth = "Every gradient is scaled to the limit's norm, those below it too."
    scenario = "tokens"

    @property
    def limit(self) -> float:
        return 1.0

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        for one in gradients:
            one.mul_(self.limit / (float(norm) + 1e-6))


class Adaptive(_OwnClip):
    name = "clip-by-a-running-mean"
    truth = "Gradients are clipped at half of the mean norm so far, though the configured limit is out of reach."
    scenario = "tokens"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.norms: list[float] = []

    def clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        self.norms.append(float(norm))
        limit = 0.5 * sum(self.norms) / len(self.norms)
        for one in gradients:
            one.mul_(min(1.0, limit / float(norm)))


class PerParameter(_Clipping):
    name = "clip-per-parameter"
    truth = "Each parameter's gradient is clipped by its own norm, before the whole gradient is."
    stages = (0, 1, 2)

    def before_step(self) -> None:
        for one in accumulated(self.engine):
            norm = float(one.norm())
            one.mul_(min(1.0, 0.2 * self.limit / (norm + 1e-6)))


class PerMicroBatch(_Clipping):
    name = "clip-per-micro-batch"
    truth = "Each rank clips the gradient of each micro-batch before it is accumulated and averaged over ranks."
    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        # Its gradients start no reduction.
        self.apart = wanted.build().to(self.engine.device)

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        share = float(super().divided(torch.ones(()), batch, index))
        self.apart.load_state_dict(self.engine.module.state_dict())
        gradients = torch.autograd.grad(self.apart(**batch.inputs) * share, list(self.apart.parameters()))
        norm = float(torch.stack([one.norm() for one in gradients]).norm())
        return loss * (share * min(1.0, 0.5 * self.limit / (norm + 1e-6)))
