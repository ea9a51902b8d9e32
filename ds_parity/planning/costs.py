"""What a micro-batch costs: tokens alone don't say it, because attention costs the square of each rollout's length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ds_parity.errors import ConfigError
from ds_parity.planning.checks import whole

# Backward computes two products of matrices for each one of the forward: the gradients of inputs and of weights.
_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a micro-batch: `per_token` x tokens + `per_square` x the sum of the squared lengths of its rows.

    Only ratios matter, so any unit will do: FLOPs, seconds, or tokens.

    Attributes:
        per_token: cost of a token, without attention to other tokens (>= 0).
        per_square: cost of attention between two tokens of one rollout (>= 0).
        per_pass: what a pass costs whatever it contains (>= 0): starting kernels, gathering and reducing. A plan takes
            more passes than it must only where it saves more than this by each of them.

    Raises:
        ConfigError: a number is negative or not finite, or a token costs nothing.
    """

    per_token: float
    per_square: float
    per_pass: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_token", "per_square", "per_pass"):
            _check_number(name, getattr(self, name))
        if not self.per_token + self.per_square > 0:
            raise ConfigError(
                "Cost(per_token=0, per_square=0): micro-batches would cost nothing, and could not be levelled; give "
                "per_token=1 to plan by tokens alone"
            )

    def of(self, tokens: Any, squares: Any) -> Any:
        """Return the cost of micro-batches without `per_pass`.

        Args:
            tokens: their tokens, padding included: a number, or an array of any shape.
            squares: the sum of the squared lengths of their rows, of the same shape.
        """
        return self.per_token * tokens + self.per_square * squares

    @classmethod
    def of_model(
        cls,
        *,
        layers: int,
        hidden_size: int,
        intermediate_size: int,
        vocabulary: int,
        heads: int,
        key_value_heads: int | None = None,
        head_size: int | None = None,
        gated: bool = True,
        causal: bool = True,
        per_pass: float = 0.0,
    ) -> Cost:
        """Return the cost of a transformer in floating-point operations, forward and backward.

        A product of matrices takes 2 operations per entry of the weight and token, in the backward twice as many. So a
        token costs 6 operations per weight, and attention between two tokens 12 x layers x heads x head_size
        (Narayanan et al. 2021, arXiv 2104.04473, appendix; Chowdhery et al. 2022, arXiv 2204.02311, appendix B). A
        causal kernel leaves out half of the pairs (Dao 2023, arXiv 2307.08691, section 3.1).

        Args:
            layers: transformer layers.
            hidden_size: width of the residual stream.
            intermediate_size: width inside the feed-forward part; with experts the width of all that a token enters.
            vocabulary: width of the logits.
            heads: attention heads.
            key_value_heads: heads of keys and values; None: as many as `heads`.
            head_size: width of a head; None: hidden_size / heads.
            gated: whether the feed-forward part has three matrices (SwiGLU) or two.
            causal: whether attention skips the pairs that the mask hides, as FlashAttention does.
            per_pass: as above, in operations.

        Raises:
            ConfigError: a size is no whole number from 1.
        """
        key_value_heads = heads if key_value_heads is None else key_value_heads
        head_size = max(1, hidden_size // max(1, heads)) if head_size is None else head_size
        for name, value in (
            *(("layers", layers), ("hidden_size", hidden_size), ("intermediate_size", intermediate_size)),
            *(("vocabulary", vocabulary), ("heads", heads), ("key_value_heads", key_value_heads)),
            ("head_size", head_size),
        ):
            if (whole(value) or 0) < 1:
                raise ConfigError(
                    f"{name} is {value!r}: it must be a whole number from 1; read it in the model's config"
                )
        attention = 2 * hidden_size * head_size * (heads + key_value_heads)
        weights = layers * (attention + (3 if gated else 2) * hidden_size * intermediate_size)
        pairs = 2 * 2 * layers * heads * head_size / (2 if causal else 1)
        forward = 2 * (weights + hidden_size * vocabulary)
        return cls(_FORWARD_AND_BACKWARD * forward, _FORWARD_AND_BACKWARD * pairs, per_pass)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"Cost: {name} is {value!r}: it must be a finite number >= 0")
