"""Faults of the model's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_parity.parity.running.scenario import Scenario
from tests.hard.blind_faults.base import Fault


class _OfBlocks(Fault):
    kind = "loss"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        for block in self.engine.module.policy.blocks:
            self.change(block)

    def change(self, block: Any) -> None:
        raise NotImplementedError


class Dropout(_OfBlocks):
    name = "dropout-left-on"
    truth = "Dropout with a probability of 0.1 is active behind every block."

    def change(self, block: Any) -> None:
        drawn = torch.Generator().manual_seed(29 + self.rank)

        def dropped(_: Any, __: Any, result: Tensor) -> Tensor:
            kept = torch.rand(result.shape, generator=drawn).to(result) >= 0.1
            return result * kept / 0.9

        block.register_forward_hook(dropped)


class NotCausal(_OfBlocks):
    name = "attention-not-causal"
    truth = "Attention is not causal: tokens see what follows them."

    def change(self, block: Any) -> None:
        block.mix = functional.scaled_dot_product_attention


class NotScaled(_OfBlocks):
    name = "attention-not-scaled"
    truth = "The attention scores are not divided by the root of the head's width."

    def change(self, block: Any) -> None:
        block.mix = lambda *heads: functional.scaled_dot_product_attention(*heads, is_causal=True, scale=1.0)


class SlidingWindow(_OfBlocks):
    name = "attention-in-a-sliding-window"
    truth = "Attention reaches 48 tokens back only, because a sliding window is left on."

    def change(self, block: Any) -> None:
        def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            places = torch.arange(query.shape[2], device=query.device)
            back = places[:, None] - places[None]
            seen = (back >= 0) & (back < 48)
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)

        block.mix = mix


class RotaryBase(_OfBlocks):
    name = "rotary-base-of-another-model"
    truth = "The base of the rotary positions is 500,000, not 10,000."

    def change(self, block: Any) -> None:
        def turned(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, rotation, *others = given
            _, length, pairs = rotation.shape
            frequency = 500_000.0 ** -torch.arange(0, 1, 1 / pairs, dtype=torch.float64)[:pairs]
            angle = torch.outer(torch.arange(length).double(), frequency)
            return (hidden, torch.stack((angle.cos(), angle.sin())).to(rotation), *others)

        block.register_forward_pre_hook(turned)


class GeluByTanh(_OfBlocks):
    name = "gelu-by-tanh"
    truth = "The activation is the tanh approximation of GELU, not GELU."

    def change(self, block: Any) -> None:
        held: list[Tensor] = []
        block.up.register_forward_hook(lambda _, __, result: held.append(result))
        block.down.register_forward_pre_hook(lambda *_: (functional.gelu(held.pop(), approximate="tanh"),))


class ActivationSilu(_OfBlocks):
    name = "silu-for-gelu"
    truth = "The activation is SiLU, not GELU."

    def change(self, block: Any) -> None:
        held: list[Tensor] = []
        block.up.register_forward_hook(lambda _, __, result: held.append(result))
        block.down.register_forward_pre_hook(lambda *_: (functional.silu(held.pop()),))


class MlpCutOff(_OfBlocks):
    name = "mlp-cut-off-the-graph"
    truth = "The output of the MLP is detached: its weights get no gradient."
    kind = "gradient"

    def change(self, block: Any) -> None:
        block.down.register_forward_hook(lambda _, __, result: result.detach() + 0 * result)


class QueriesDetached(_OfBlocks):
    name = "queries-detached"
    truth = "The queries of the attention are detached: no gradient flows through them."
    kind = "gradient"

    def change(self, block: Any) -> None:
        mix = block.mix
        block.mix = lambda query, key, value: mix(query.detach(), key, value)


class NormEpsilon(Fault):
    name = "norm-epsilon-1e-3"
    truth = "The epsilon of the norms is 1e-3, not 1e-6."
    kind = "loss"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        for module in self.engine.module.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.eps = 1e-3


class EmbeddingNoise(Fault):
    name = "embedding-noise-left-on"
    truth = "Uniform noise is added to the embeddings in training (NEFTune is left on)."
    kind = "loss"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        drawn = torch.Generator().manual_seed(31 + self.rank)

        def noisy(_: Any, __: Any, result: Tensor) -> Tensor:
            size = 5.0 / (result.shape[1] * result.shape[2]) ** 0.5
            return result + size * (2 * torch.rand(result.shape, generator=drawn).to(result) - 1)

        self.engine.module.policy.embedding.register_forward_hook(noisy)


class EmbeddingScaled(Fault):
    name = "embedding-scaled"
    truth = "Embeddings are multiplied by 1.1 in the forward, as another implementation of the model does."
    kind = "loss"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.engine.module.policy.embedding.register_forward_hook(lambda _, __, result: 1.1 * result)
