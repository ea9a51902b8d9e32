"""Faults of the optimizer's settings and state."""

from __future__ import annotations

from typing import ClassVar

from ds_parity.parity.running.scenario import Scenario
from tests.hard.blind_faults.base import Fault, OfOptimizer, Values, edit_weights, states

_ADAMW = {"optimizer": "AdamW"}


class AdamEps(OfOptimizer):
    name = "adam-eps-1e-6"
    truth = "Adam's eps is 1e-6 in place of 1e-8."
    kind = "optimizer settings"
    needs = _ADAMW
    params: ClassVar[Values] = {"eps": 1e-6}


class AdamLargeEps(OfOptimizer):
    name = "adam-eps-1e-3"
    truth = "Adam's eps is 1e-3 in place of 1e-8."
    kind = "optimizer settings"
    needs = _ADAMW
    params: ClassVar[Values] = {"eps": 1e-3}


class AdamBeta1(OfOptimizer):
    name = "adam-beta1-0.8"
    truth = "Adam's first beta is 0.8 in place of 0.9."
    kind = "optimizer settings"
    needs = _ADAMW
    params: ClassVar[Values] = {"betas": [0.8, 0.999]}


class AdamBeta2(OfOptimizer):
    name = "adam-beta2-0.95"
    truth = "Adam's second beta is 0.95 in place of 0.999."
    kind = "optimizer settings"
    needs = _ADAMW
    params: ClassVar[Values] = {"betas": [0.9, 0.95]}


class NoBiasCorrection(OfOptimizer):
    name = "adam-without-bias-correction"
    truth = "Adam's bias correction is off."
    kind = "optimizer settings"
    needs = _ADAMW
    params: ClassVar[Values] = {"bias_correction": False}


class DecayMissing(OfOptimizer):
    name = "weight-decay-missing"
    truth = "There is no weight decay, though it is configured."
    kind = "optimizer settings"
    needs: ClassVar[Values] = {"optimizer": "AdamW", "weight_decay": 0.1}
    params: ClassVar[Values] = {"weight_decay": 0.0}


class DecayCoupled(OfOptimizer):
    name = "weight-decay-coupled"
    truth = "Weight decay is added to the gradient (Adam with L2) and not applied to the weights (AdamW)."
    kind = "optimizer settings"
    needs: ClassVar[Values] = {"optimizer": "AdamW", "weight_decay": 0.1}
    type = "Adam"
    params: ClassVar[Values] = {"adam_w_mode": False}


class DecayOnNorms(Fault):
    name = "weight-decay-on-norms"
    truth = "Weight decay is applied to the norms' weights too, which should have none."
    kind = "optimizer settings"
    needs: ClassVar[Values] = {
        "optimizer": "AdamW",
        "weight_decay": 0.1,
        "setup": "tests.hard.blind_faults.setups:matrices_decayed",
    }

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        for group in self.engine.basic_optimizer.param_groups:
            group["weight_decay"] = 0.1


class DecayInSgd(OfOptimizer):
    name = "sgd-with-weight-decay"
    truth = "SGD has a weight decay of 0.01 that is not configured."
    kind = "optimizer settings"
    params: ClassVar[Values] = {"weight_decay": 0.01}


class Dampening(OfOptimizer):
    name = "momentum-dampened"
    truth = "SGD's momentum has a dampening of 0.5."
    kind = "optimizer settings"
    params: ClassVar[Values] = {"dampening": 0.5}


class Nesterov(OfOptimizer):
    name = "nesterov-momentum"
    truth = "SGD uses Nesterov momentum."
    kind = "optimizer settings"
    params: ClassVar[Values] = {"nesterov": True}


class NoMomentum(OfOptimizer):
    name = "no-momentum"
    truth = "SGD has no momentum."
    kind = "optimizer settings"
    params: ClassVar[Values] = {"momentum": 0.0}


class MoreMomentum(OfOptimizer):
    name = "momentum-0.95"
    truth = "SGD's momentum is 0.95 in place of 0.9."
    kind = "optimizer settings"
    params: ClassVar[Values] = {"momentum": 0.95}


class MomentumWithRate(Fault):
    name = "learning-rate-inside-the-momentum"
    truth = "The learning rate is multiplied into the momentum buffer, so that old gradients keep their old rate."
    kind = "optimizer settings"

    before: float | None = None

    def before_step(self) -> None:
        rate = self.engine.get_lr()[0]
        for state in states(self.engine):
            state["momentum_buffer"].mul_((self.before or rate) / rate)
        self.before = rate


class HeadFaster(Fault):
    name = "head-learns-faster"
    truth = "The learning rate of the output head's group is twice that of the others."
    kind = "optimizer settings"
    needs: ClassVar[Values] = {"setup": "tests.hard.blind_faults.setups:head_apart"}

    def before_step(self) -> None:
        self.engine.basic_optimizer.param_groups[-1]["lr"] = 2 * self.engine.get_lr()[0]


class LayerwiseMomentum(Fault):
    name = "head-without-momentum"
    truth = "The output head's parameter group has no momentum."
    kind = "optimizer settings"
    needs: ClassVar[Values] = {"setup": "tests.hard.blind_faults.setups:head_apart"}

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.engine.basic_optimizer.param_groups[-1]["momentum"] = 0.0


class StateResetEachStep(Fault):
    name = "optimizer-state-reset-every-second-step"
    truth = "The optimizer loses its state after every second step, because it is built anew."
    kind = "optimizer settings"

    def after_step(self) -> None:
        if self.number % 2 == 0:
            for state in states(self.engine):
                state["momentum_buffer"].zero_()


class MomentsInBf16(Fault):
    name = "adam-moments-in-bf16"
    truth = "Adam's moments are rounded to bf16 after each step."
    kind = "optimizer settings"
    needs = _ADAMW

    def after_step(self) -> None:
        for state in states(self.engine):
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].bfloat16())


class DecayByHand(Fault):
    name = "weights-decayed-by-hand"
    truth = "The loop itself multiplies all weights by 0.999 after each step."
    kind = "weights"
    stages = (0, 1, 2)

    def after_step(self) -> None:
        edit_weights(self.engine, lambda weight: weight.mul_(0.999))
