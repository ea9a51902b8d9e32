"""Faults of the model's weights: changed by something else than the optimizer's step, or not by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_parity.parity.running.scenario import Scenario
from tests.hard.blind_faults.base import Fault, edit_weights, set_weights, weights_of


class Rounded(Fault):
    name = "weights-rounded-to-bf16"
    truth = "The weights are rounded to bf16 after every step."
    kind = "weights"
    stages = (0, 1, 2)

    def after_step(self) -> None:
        edit_weights(self.engine, lambda weight: weight.copy_(weight.bfloat16()))


class AverageWrittenBack(Fault):
    name = "moving-average-written-back"
    truth = "The moving average of the weights (0.5) is written back into the model after every step."
    kind = "weights"
    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.average = weights_of(self.engine)

    def after_step(self) -> None:
        own = weights_of(self.engine)
        self.average = {name: 0.5 * self.average[name] + 0.5 * weight for name, weight in own.items()}
        set_weights(self.engine, self.average)


class MixedWithInitial(Fault):
    name = "weights-pulled-to-the-initial-ones"
    truth = "After every step the weights are mixed with 1 % of the initial weights."
    kind = "weights"
    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.initial = weights_of(self.engine)

    def after_step(self) -> None:
        own = weights_of(self.engine)
        set_weights(self.engine, {name: 0.99 * own[name] + 0.01 * self.initial[name] for name in own})


class Stale(Fault):
    name = "weights-one-step-stale"
    truth = "Losses and gradients are computed with the weights as they were before the last step."
    kind = "weights"
    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.before: dict[str, Tensor] | None = None
        self.current: dict[str, Tensor] = {}

    def backward(self, index: int) -> None:
        if index == self.window.first:
            self.current = weights_of(self.engine)
            self._show(self.before or self.current)
            self.before = self.current
        super().backward(index)

    def before_step(self) -> None:
        self._show(self.current)

    @torch.no_grad()
    def _show(self, weights: dict[str, Tensor]) -> None:
        # The optimizer has a copy of its own on ZeRO 1 and 2, and on ZeRO 0 finds the current ones again at its step.
        for name, parameter in self.engine.module.named_parameters():
            parameter.data.copy_(weights[name])


class _OtherStep(Fault):
    """The optimizer's own step is replaced."""

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.step: Callable[..., Any] = self.engine.basic_optimizer.step
        self.engine.basic_optimizer.step = self.stepped

    def stepped(self, *given: Any, **named: Any) -> Any:
        raise NotImplementedError


class ThirdSkipped(_OtherStep):
    name = "third-step-not-applied"
    truth = "The optimizer does not run at the third step, though the log shows it as applied."
    kind = "weights"

    def stepped(self, *given: Any, **named: Any) -> Any:
        return None if self.number == 3 else self.step(*given, **named)


class SecondTwice(_OtherStep):
    name = "second-step-applied-twice"
    truth = "The optimizer runs twice at the second step, with the same gradient."
    kind = "weights"

    def stepped(self, *given: Any, **named: Any) -> Any:
        if self.number == 2:
            self.step(*given, **named)
        return self.step(*given, **named)


class EveryStepTwice(_OtherStep):
    name = "every-step-applied-twice"
    truth = "The optimizer's step runs twice in each step, by the engine and by the loop."
    kind = "weights"

    def stepped(self, *given: Any, **named: Any) -> Any:
        self.step(*given, **named)
        return self.step(*given, **named)


class ShardFrozen(_OtherStep):
    name = "shard-of-one-rank-not-stepped"
    truth = "The optimizer of rank 1 never runs, so that its shard of the weights does not change."
    kind = "weights"
    stages = (1, 2, 3)

    def stepped(self, *given: Any, **named: Any) -> Any:
        return None if self.rank == 1 else self.step(*given, **named)


class HeadTied(Fault):
    name = "head-tied-by-mistake"
    truth = "After the first step the output head is set to the embedding, as if the two were tied."
    kind = "weights"
    stages = (0, 1, 2)

    def after_step(self) -> None:
        if self.number == 1:
            own = weights_of(self.engine)
            embedding = next(weight for name, weight in own.items() if "embedding" in name)
            set_weights(self.engine, {name: embedding for name in own if "head" in name})


class AnotherSeed(Fault):
    name = "initialised-from-another-seed"
    truth = "The model's initial weights are drawn from another seed."
    kind = "weights"

    def of_engine(self) -> Scenario:
        return replace(self.wanted, seed=self.wanted.seed + 1)


class LoadedInBf16(Fault):
    name = "initial-weights-from-bf16"
    truth = "The initial weights are loaded from a copy that was saved in bf16."
    kind = "weights"
    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        edit_weights(self.engine, lambda weight: weight.copy_(weight.bfloat16()))


class NormsReset(Fault):
    name = "norm-weights-reset-after-each-step"
    truth = "The norms' weights are set to 1 again after every step."
    kind = "weights"
    stages = (0, 1, 2)

    def after_step(self) -> None:
        own = weights_of(self.engine)
        set_weights(self.engine, {name: torch.ones_like(own[name]) for name in own if "norm" in name})
