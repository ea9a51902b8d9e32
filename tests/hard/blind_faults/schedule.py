"""Faults of the learning rate's schedule."""

from __future__ import annotations

import math
from typing import ClassVar

from ds_parity.parity.running.own_batches import Record
from ds_parity.parity.running.scenario import Scenario
from tests.hard.blind_faults.base import Fault, OfOptimizer, OfScheduler, Values


class WarmupFromOne(Fault):
    name = "warm-up-counted-from-one"
    truth = "The warm-up is counted from 1: every step has the learning rate of the step after it."
    kind = "schedule"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.scheduler.step()


class Peak(OfScheduler):
    name = "warm-up-to-another-peak"
    truth = "The warm-up ends at a learning rate of 0.04, not 0.05."
    kind = "schedule"
    params: ClassVar[Values] = {"warmup_max_lr": 0.04}


class Floor(OfScheduler):
    name = "warm-up-from-zero"
    truth = "The warm-up starts at a learning rate of 0, not at the configured minimum."
    kind = "schedule"
    params: ClassVar[Values] = {"warmup_min_lr": 0.0}


class Logarithmic(OfScheduler):
    name = "warm-up-logarithmic"
    truth = "The warm-up is logarithmic, not linear."
    kind = "schedule"
    params: ClassVar[Values] = {"warmup_type": "log"}


class ShorterWarmup(OfScheduler):
    name = "warm-up-shorter"
    truth = "The warm-up takes 5 steps, not 10, because it is divided by the ranks."
    kind = "schedule"
    params: ClassVar[Values] = {"warmup_num_steps": 5}


class Constant(Fault):
    name = "scheduler-never-stepped"
    truth = "The scheduler is never stepped: the learning rate stays as it was at the start."
    kind = "schedule"

    def move(self, applied: bool) -> None:
        self.after_step()


class EverySecond(Fault):
    name = "scheduler-stepped-every-second-time"
    truth = "The scheduler is stepped after every second step only."
    kind = "schedule"

    def move(self, applied: bool) -> None:
        if self.number % 2 == 0:
            super().move(applied)


class TwiceAStep(Fault):
    name = "scheduler-stepped-twice"
    truth = "The scheduler is stepped twice after each step, by the loop and by the engine."
    kind = "schedule"

    def after_step(self) -> None:
        self.scheduler.step()


class ByRollouts(Fault):
    name = "scheduler-stepped-by-the-ranks-passes"
    truth = "The scheduler is stepped once for each micro-batch of the rank that holds rollouts."
    kind = "schedule"

    def move(self, applied: bool) -> None:
        for _ in range(sum(not row[0].idle for row in self.rows)):
            self.scheduler.step()


class _Scaled(Fault):
    by: ClassVar[float] = 1.0

    def of_engine(self) -> Scenario:
        section = dict(self.wanted.config["scheduler"])
        params = dict(section["params"])
        for key in ("warmup_min_lr", "warmup_max_lr"):
            params[key] *= self.by
        return self.configured(scheduler={**section, "params": params})


class ScaledByRanks(_Scaled):
    name = "learning-rate-times-ranks"
    truth = "The learning rate is multiplied by the number of ranks."
    kind = "schedule"
    by = 2.0


class ScaledByRoot(_Scaled):
    name = "learning-rate-times-the-root-of-ranks"
    truth = "The learning rate is multiplied by the square root of the number of ranks."
    kind = "schedule"
    by = math.sqrt(2)


class UsedOneStepLate(Fault):
    name = "learning-rate-used-one-step-late"
    truth = "The optimizer uses the learning rate of the step before, and the log shows the right one."
    kind = "schedule"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.before: list[float] | None = None
        step, groups = self.engine.basic_optimizer.step, self.engine.basic_optimizer.param_groups

        def stepped(*given: object, **named: object) -> object:
            own = [group["lr"] for group in groups]
            for group, rate in zip(groups, self.before or own, strict=True):
                group["lr"] = rate
            result = step(*given, **named)
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate
            return result

        self.engine.basic_optimizer.step = stepped

    def close(self, number: int, record: Record) -> None:
        own = list(self.engine.get_lr())
        super().close(number, record)
        self.before = own


class FloorOfDecay(OfScheduler):
    name = "decay-to-another-floor"
    truth = "The cosine decays to 0 and not to a tenth of the learning rate."
    kind = "schedule"
    needs: ClassVar[Values] = {"scheduler": "WarmupCosineLR"}
    params: ClassVar[Values] = {"cos_min_ratio": 0.0}


class DecayTooSlow(OfScheduler):
    name = "decay-too-slow"
    truth = "The cosine is given twice the number of steps, and so decays too slowly."
    kind = "schedule"
    needs: ClassVar[Values] = {"scheduler": "WarmupCosineLR"}
    params: ClassVar[Values] = {"total_num_steps": 12}


class NoScheduler(OfOptimizer):
    name = "no-scheduler"
    truth = "There is no scheduler: the learning rate is that of the optimizer from the first step."
    kind = "schedule"

    def of_engine(self) -> Scenario:
        config = {key: value for key, value in self.wanted.config.items() if key != "scheduler"}
        return type(self.wanted).from_json({**self.wanted.to_json(), "config": config})


class RateRounded(Fault):
    name = "learning-rate-rounded"
    truth = "The learning rate is rounded to two decimals when it is set."
    kind = "schedule"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self._round()

    def after_step(self) -> None:
        self._round()

    def _round(self) -> None:
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = round(group["lr"], 2)
