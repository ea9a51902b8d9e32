"""Faults of precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_parity.parity.running.scenario import Scenario
from tests.hard.blind_faults.base import Fault, OwnLoss, states


class LossInBf16(OwnLoss):
    name = "loss-in-bf16"
    truth = "The log probabilities are computed in bf16."
    kind = "loss"

    def logps(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().logps(logits.bfloat16(), targets).float()


class LogitsInBf16(OwnLoss):
    name = "logits-through-bf16"
    truth = "The logits are rounded to bf16 before the loss, which is computed in fp32."
    kind = "loss"

    def logits(self, input_ids: Tensor) -> Tensor:
        return super().logits(input_ids).bfloat16().float()


class ForwardInBf16(OwnLoss):
    name = "autocast-left-on"
    truth = "The forward runs under bf16 autocast, in a run that should be in fp32."
    kind = "loss"

    def logits(self, input_ids: Tensor) -> Tensor:
        with torch.autocast(input_ids.device.type, torch.bfloat16):
            return super().logits(input_ids).float()


class HeadInFp16(OwnLoss):
    name = "head-in-fp16"
    truth = "The output head computes in fp16."
    kind = "loss"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.module.policy.head.register_forward_pre_hook(lambda _, given: (given[0].half().float(),))
        self.module.policy.head.register_forward_hook(lambda _, __, result: result.half().float())


class SumInBf16(OwnLoss):
    name = "mean-summed-in-bf16"
    truth = "The losses of a micro-batch's tokens are summed in bf16."
    kind = "loss"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return super().mean(losses.bfloat16(), mask.bfloat16()).float()


class RotationInBf16(Fault):
    name = "rotary-positions-in-bf16"
    truth = "The cosines and sines of the rotary positions are rounded to bf16."
    kind = "loss"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        for block in self.engine.module.policy.blocks:
            block.register_forward_pre_hook(self._rounded)

    def _rounded(self, _: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, rotation, *others = given
        return (hidden, rotation.bfloat16().double(), *others)


class MomentumInBf16(Fault):
    name = "momentum-in-bf16"
    truth = "The optimizer's momentum is kept in bf16."
    kind = "optimizer settings"
    scenario = "clipped"

    def after_step(self) -> None:
        for state in states(self.engine):
            state["momentum_buffer"].copy_(state["momentum_buffer"].bfloat16())


class GradientInBf16(OwnLoss):
    name = "gradient-of-the-logits-in-bf16"
    truth = "The backward of the loss runs in bf16: the gradient of the logits is rounded."
    kind = "gradient"

    def logits(self, input_ids: Tensor) -> Tensor:
        logits = super().logits(input_ids)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.bfloat16().float())
        return logits
