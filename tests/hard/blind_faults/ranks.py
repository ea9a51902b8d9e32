"""Faults of what ranks do differently, or tell each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ds_parity.parity.running.scenario import Scenario
from ds_parity.planning.rollout import MicroBatch
from tests.hard.blind_faults.base import Fault


class NotBroadcast(Fault):
    name = "weights-not-broadcast"
    truth = "Rank 1 starts from other weights, one percent larger, because they were not broadcast from rank 0."
    kind = "weights"
    stages = (1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        if self.rank == 1:
            held = [*self.engine.module.parameters(), *self.engine.optimizer.single_partition_of_fp32_groups]
            with torch.no_grad():
                for one in held:
                    one.data.mul_(1.01)


class OtherRateOnOneRank(Fault):
    name = "learning-rate-of-one-rank-doubled"
    truth = "The optimizer of rank 1 has twice the learning rate, which acts on its shard of the weights."
    kind = "optimizer settings"
    stages = (1, 2, 3)

    def before_step(self) -> None:
        if self.rank == 1:
            for group in self.engine.basic_optimizer.param_groups:
                group["lr"] *= 2


class AdvantagesOfRankZero(Fault):
    name = "advantages-of-rank-zero-everywhere"
    truth = (
        "Rank 1 uses the advantages of rank 0's rollouts of the same pass, because a gather returned the wrong part."
    )
    kind = "data"
    scenario = "uniform"

    def inputs(self, index: int) -> MicroBatch:
        own, first = super().inputs(index), self.passes[index][0].inputs["advantages"]
        return replace(own, inputs={**own.inputs, "advantages": first.to(own.inputs["advantages"].device)})


class UnitsOfRankZero(Fault):
    name = "token-counts-of-rank-zero-everywhere"
    truth = "Rank 1 weighs its micro-batches by the number of tokens in those that rank 0 has in the same pass."
    kind = "gradient"

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        first = self.passes[index][0]
        units = self.units(batch if first.idle else first)
        return loss * (units * self.averaged() / self.total(index))


class OneRankOnePassLate(Fault):
    name = "one-rank-one-pass-behind"
    truth = "Rank 1 reads its data one pass late: it repeats its first micro-batch and never catches up."
    kind = "data"
    scenario = "uniform"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        if self.rank == 1:
            self.own = [self.own[0], *self.own[:-1]]


class OneRankInBf16(Fault):
    name = "one-rank-in-bf16"
    truth = "Rank 1 runs its forward under bf16 autocast, and rank 0 does not."
    kind = "loss"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        if self.rank == 1:
            whole = self.engine.module.forward

            def forward(**inputs: Any) -> Any:
                with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16):
                    return whole(**inputs)

            self.engine.module.forward = forward


class StaleOnOneRank(Fault):
    name = "one-rank-keeps-its-first-weights"
    truth = "Rank 1 computes every gradient with the initial weights: it never takes over the updated ones."
    kind = "weights"
    stages = (1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.first = [parameter.detach().clone() for parameter in self.engine.module.parameters()]

    def backward(self, index: int) -> None:
        if self.rank != 1:
            super().backward(index)
            return
        parameters = list(self.engine.module.parameters())
        current = [parameter.detach().clone() for parameter in parameters]
        self._show(self.first)
        super().backward(index)
        self._show(current)

    @torch.no_grad()
    def _show(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self.engine.module.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
