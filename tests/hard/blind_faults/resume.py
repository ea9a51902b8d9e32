"""Faults of a run that is resumed from a checkpoint in its middle."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ds_parity.parity.running.scenario import Scenario
from tests.hard.blind_faults.base import Fault, Values, edit_weights, from_all_ranks, set_weights, states, weights_of


class WithoutMomentum(Fault):
    name = "resumed-without-optimizer-state"
    truth = "The run is resumed after the second step without the optimizer's state."
    kind = "optimizer settings"

    def after_step(self) -> None:
        if self.number == 2:
            for state in states(self.engine):
                state["momentum_buffer"].zero_()


class MomentumOfTheOtherRank(Fault):
    name = "resumed-with-the-shards-of-the-other-rank"
    truth = "The run is resumed after the second step with the optimizer shards of the two ranks exchanged."
    kind = "optimizer settings"
    stages = (1, 2)

    def after_step(self) -> None:
        if self.number != 2:
            return
        own = [state["momentum_buffer"].cpu() for state in states(self.engine)]
        others = from_all_ranks(own)[1 - self.rank]
        for state, other in zip(states(self.engine), others, strict=True):
            state["momentum_buffer"].copy_(other)


class SecondMomentLost(Fault):
    name = "resumed-without-second-moment"
    truth = "The run is resumed after the second step with Adam's second moment at zero."
    kind = "optimizer settings"
    needs: ClassVar[Values] = {"optimizer": "AdamW"}

    def after_step(self) -> None:
        if self.number == 2:
            for state in states(self.engine):
                state["exp_avg_sq"].zero_()


class AdamCountsAnew(Fault):
    name = "resumed-with-adams-step-at-zero"
    truth = "The run is resumed after the second step with Adam's moments, but its count of steps begins anew."
    kind = "optimizer settings"
    needs: ClassVar[Values] = {"optimizer": "AdamW"}

    def after_step(self) -> None:
        if self.number != 2:
            return
        # DeepSpeed's optimizers count in a group or in the state, torch's in the state alone.
        for holder in [*self.engine.basic_optimizer.param_groups, *states(self.engine)]:
            if "step" in holder:
                holder["step"] = holder["step"] * 0


class ScheduleRestarts(Fault):
    name = "resumed-with-the-schedule-at-its-start"
    truth = "The run is resumed after the third step without the scheduler's state: the warm-up begins anew."
    kind = "schedule"

    def after_step(self) -> None:
        if self.number == 3:
            self.scheduler.step(0)


class ScheduleAhead(Fault):
    name = "resumed-with-the-schedule-ahead"
    truth = "The run is resumed after the second step with a schedule that has moved two steps too far."
    kind = "schedule"

    def after_step(self) -> None:
        if self.number == 2:
            self.scheduler.step()
            self.scheduler.step()


class OlderWeights(Fault):
    name = "resumed-with-older-weights"
    truth = "After the third step the weights are loaded from the checkpoint before it; all other state goes on."
    kind = "weights"
    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.saved: dict[str, Tensor] = {}

    def after_step(self) -> None:
        if self.number == 2:
            self.saved = weights_of(self.engine)
        if self.number == 3:
            set_weights(self.engine, self.saved)


class Bf16Weights(Fault):
    name = "resumed-from-bf16-weights"
    truth = "The run is resumed after the second step from weights that were saved in bf16."
    kind = "weights"
    stages = (0, 1, 2)

    def after_step(self) -> None:
        if self.number == 2:
            edit_weights(self.engine, lambda weight: weight.copy_(weight.bfloat16()))


class KeyMissing(Fault):
    name = "resumed-with-a-missing-key"
    truth = "The run is resumed after the second step without the MLP's last matrix, which begins at its first values."
    kind = "weights"
    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.first = {name: weight for name, weight in weights_of(self.engine).items() if "down" in name}

    def after_step(self) -> None:
        if self.number == 2:
            set_weights(self.engine, self.first)


class MasterWeightsOld(Fault):
    name = "resumed-with-old-master-weights"
    truth = (
        "The model is loaded, but the optimizer's copy of the weights is not: the next step starts from the old ones."
    )
    kind = "weights"
    stages = (1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.saved: list[Tensor] = []

    def after_step(self) -> None:
        own = self.engine.optimizer.single_partition_of_fp32_groups
        if self.number == 1:
            self.saved = [one.detach().clone() for one in own]
        if self.number == 2:
            with torch.no_grad():
                for one, saved in zip(own, self.saved, strict=True):
                    one.data.copy_(saved)
