"""Faults of parameters that are frozen, or that the optimizer does not have."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ds_parity.parity.running.scenario import Scenario
from tests.hard.blind_faults.base import Fault, named, set_weights, weights_of

_SETUPS = "tests.hard.blind_faults.setups"


class EmbeddingFrozen(Fault):
    name = "embedding-frozen"
    truth = "The embedding is frozen."
    kind = "gradient"

    def of_engine(self) -> Scenario:
        return replace(self.wanted, setup=f"{_SETUPS}:embedding_frozen")


class HeadForgotten(Fault):
    name = "head-not-given-to-the-optimizer"
    truth = "The output head is not among the optimizer's parameters, and so never changes."
    kind = "gradient"

    def of_engine(self) -> Scenario:
        return replace(self.wanted, setup=f"{_SETUPS}:head_forgotten")


class AttentionFrozenLater(Fault):
    name = "attention-frozen-from-the-third-step"
    truth = "The attention's gradient is zero from the third step on, because a stage of the training freezes it."
    kind = "gradient"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        for parameter in (*named(self.engine, "qkv"), *named(self.engine, "out.weight")):
            parameter.register_hook(self._until_then)

    def _until_then(self, gradient: Tensor) -> Tensor:
        return gradient * float(self.number < 3)


class UpRestored(Fault):
    name = "mlp-restored-after-each-step"
    truth = "The MLP's first matrix is set back to its initial values after each step; its gradient is logged as usual."
    kind = "weights"
    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.first = {name: weight for name, weight in weights_of(self.engine).items() if "up" in name}

    def after_step(self) -> None:
        set_weights(self.engine, self.first)


class ValuesLost(Fault):
    name = "values-gradient-lost"
    truth = "The part of the attention's matrix that makes the values gets no gradient."
    kind = "gradient"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        for parameter in named(self.engine, "qkv"):
            parameter.register_hook(_without_values)


def _without_values(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[2 * len(gradient) // 3 :] = 0
    return gradient
