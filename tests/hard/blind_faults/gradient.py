"""Faults of the gradient between the loss and the clip."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ds_parity.parity.running.scenario import Scenario
from ds_parity.planning.rollout import MicroBatch
from tests.hard.blind_faults.base import SPACE, Fault, named


class _Hooked(Fault):
    """The gradient of some parameters is changed in every backward, before ranks are averaged."""

    of: ClassVar[str] = ""

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        for parameter in named(self.engine, self.of):
            parameter.register_hook(self.hooked)

    def hooked(self, gradient: Tensor) -> Tensor:
        raise NotImplementedError


class Noise(_Hooked):
    name = "gradient-noise"
    truth = "Random noise is added to the gradient."
    kind = "gradient"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.noise = torch.Generator().manual_seed(17 + self.rank)

    def hooked(self, gradient: Tensor) -> Tensor:
        noise = torch.randn(gradient.shape, generator=self.noise).to(gradient)
        return gradient + 1e-3 * noise


class EmbeddingTwice(_Hooked):
    name = "embedding-gradient-doubled"
    truth = "The gradient of the embedding is twice as large as it should be."
    kind = "gradient"
    of = "embedding"

    def hooked(self, gradient: Tensor) -> Tensor:
        return gradient * 2


class HeadScaled(_Hooked):
    name = "head-gradient-scaled-down"
    truth = "The gradient of the output head is divided by ten."
    kind = "gradient"
    of = "head"

    def hooked(self, gradient: Tensor) -> Tensor:
        return gradient / 10


class NormsZeroed(_Hooked):
    name = "norm-gradients-zeroed"
    truth = "The gradient of the norms' weights is zeroed."
    kind = "gradient"
    of = "norm"

    def hooked(self, gradient: Tensor) -> Tensor:
        return gradient * 0


class HeadLostOnOneRank(_Hooked):
    name = "head-gradient-of-one-rank-lost"
    truth = "The gradient of the output head of rank 1 does not reach the average over ranks."
    kind = "gradient"
    of = "head"

    def hooked(self, gradient: Tensor) -> Tensor:
        return gradient * float(self.rank == 0)


class ThroughFp16(_Hooked):
    name = "gradient-through-fp16"
    truth = "Gradients pass through fp16 without a loss scale: small ones become zero."
    kind = "gradient"

    def hooked(self, gradient: Tensor) -> Tensor:
        return gradient.half().to(gradient.dtype)


class Sparse(_Hooked):
    name = "gradient-compressed"
    truth = "Only the largest tenth of each parameter's gradient is communicated, and the rest is dropped."
    kind = "gradient"

    def hooked(self, gradient: Tensor) -> Tensor:
        kept = max(1, gradient.numel() // 10)
        limit = gradient.abs().flatten().topk(kept).values[-1]
        return gradient * (gradient.abs() >= limit)


class Centralised(_Hooked):
    name = "gradient-centralised"
    truth = "The mean of each row is subtracted from the gradients of matrices (gradient centralisation is left on)."
    kind = "gradient"

    def hooked(self, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(-1, keepdim=True) if gradient.dim() > 1 else gradient


class SpaceRowLost(_Hooked):
    name = "gradient-of-one-embedding-row-lost"
    truth = "The embedding's row of the space gets no gradient, because it is taken for the padding index."
    kind = "gradient"
    of = "embedding"

    def hooked(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[SPACE] = 0
        return gradient


class OneRankScaled(Fault):
    name = "gradient-scaled-on-one-rank"
    truth = "The gradient of rank 1 is one and a half times as large as it should be."
    kind = "gradient"

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        return super().divided(loss, batch, index) * (1.5 if self.rank == 1 else 1.0)


class OneRankLost(Fault):
    name = "gradient-of-one-rank-lost"
    truth = "The gradient of rank 1 does not reach the average over ranks."
    kind = "gradient"

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        return super().divided(loss, batch, index) * (0.0 if self.rank == 1 else 1.0)


class ReducedInBf16(Fault):
    name = "gradient-reduced-in-bf16"
    truth = "Gradients are communicated between ranks in bf16."
    kind = "gradient"

    def of_engine(self) -> Scenario:
        return self.configured(communication_data_type="bf16")


class ReducedInFp16(Fault):
    name = "gradient-reduced-in-fp16"
    truth = "Gradients are communicated between ranks in fp16."
    kind = "gradient"

    def of_engine(self) -> Scenario:
        return self.configured(communication_data_type="fp16")


class LossScaleForgotten(Fault):
    name = "third-step-not-unscaled"
    truth = "The gradient of the third step is four times as large, because a scale on its loss was not taken off."
    kind = "gradient"

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        return super().divided(loss, batch, index) * (4.0 if self.number == 3 else 1.0)
