"""What a micro-batch costs: tokens alone don't say it, because attention costs the square of each rollout's length."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from numbers import Real
from typing import Any

from ds_parity.errors import ConfigError
from ds_parity.planning.checks import whole

# Backward computes two products of matrices for each one of the forward: the gradients of inputs and of weights.
_FORWARD_AND_BACKWARD = 3
# Within these, times the tokens and squares of any window, nothing is rounded to 0 or to infinity.
_LEAST, _MOST = 1e-100, 1e100


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a micro-batch: `per_token` x tokens + `per_square` x the sum of the squared lengths of its rows.

    Only ratios matter, so any unit will do: FLOPs, seconds, or tokens. Each number is 0, or from 1e-100 to 1e100, and
    is kept as a float.

    Attributes:
        per_token: cost of a token, without attention to other tokens (>= 0).
        per_square: cost of attention between two tokens of one rollout (>= 0).
        per_pass: what a pass costs whatever it contains (>= 0): starting kernels, gathering and reducing. A plan takes
            more passes than it must only where it saves more than this by each of them.

    Raises:
        ConfigError: a number is none of these, or a token costs nothing.
    """

    per_token: float
    per_square: float
    per_pass: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_token", "per_square", "per_pass"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
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
        causal kernel leaves out half of the pairs (Dao 2023, arXiv 2307.08691, section 3.1). Layers with a sliding
        window are taken as full attention.

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
        sizes = {"layers": layers, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        sizes |= {"vocabulary": vocabulary, "heads": heads, "key_value_heads": key_value_heads}
        for name, value in sizes.items() if head_size is None else {**sizes, "head_size": head_size}.items():
            if (whole(value) or 0) < 1:
                raise ConfigError(
                    f"{name} is {value!r}: it must be a whole number from 1; read it in the model's config"
                )
        head_size = max(1, hidden_size // heads) if head_size is None else head_size
        attention = 2 * hidden_size * head_size * (heads + key_value_heads)
        weights = layers * (attention + (3 if gated else 2) * hidden_size * intermediate_size)
        pairs = (2 if causal else 2 * 2) * layers * heads * head_size
        forward = 2 * (weights + hidden_size * vocabulary)
        return cls(_FORWARD_AND_BACKWARD * forward, _FORWARD_AND_BACKWARD * pairs, per_pass)

    @classmethod
    def fitted(cls, measured: Iterable[tuple[float, float, float]]) -> Cost:
        """Return the cost that fits measured times best, by least squares of the relative errors; no number is below 0.

        Args:
            measured: (tokens, sum of squared lengths, time) of at least three micro-batches of different make-up, such
                as one long rollout, one short one, and many short ones.

        Raises:
            ConfigError: there are fewer than three, one is not three numbers from 1e-100 to 1e100, or all are of one
                make-up.
        """
        try:
            given = [(_as_float(tokens), _as_float(squares), _as_float(time)) for tokens, squares, time in measured]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Cost.fitted: {reprlib.repr(measured)} is no list of (tokens, sum of squared lengths, time), three "
                f"numbers of each micro-batch ({error})"
            ) from None
        if len(given) < 3 or not all(_LEAST <= number <= _MOST for one in given for number in one):
            raise ConfigError(
                f"Cost.fitted: {len(given)} measured micro-batches: it takes at least three, with tokens, squares and "
                f"times from {_LEAST:g} to {_MOST:g}"
            )
        check_make_up("Cost.fitted", "measured micro-batches", [(tokens, squares) for tokens, squares, _ in given])
        # Each time is 1 in its own unit, so that a short pass says as much as a long one.
        rows = [(tokens / time, squares / time, 1 / time) for tokens, squares, time in given]
        fits = [fit for size in (3, 2, 1) for used in combinations(range(3), size) if (fit := _solved(rows, used))]
        fits = [fit for fit in fits if fit[0] + fit[1] > 0]
        if not fits:
            raise ConfigError(
                "Cost.fitted: no cost of a token and of a square explains the times: measure micro-batches of more "
                "different make-up, each several times"
            )
        return cls(*min(fits, key=lambda fit: _error(rows, fit)))


def check_is_cost(cost: Any) -> None:
    """Raise ConfigError for what is neither a cost nor None."""
    if not isinstance(cost, Cost | None):
        raise ConfigError(f"cost is {cost!r}: it must be a ds_parity.Cost(per_token=, per_square=), or None for tokens")


def check_make_up(by: str, of: str, sizes: Sequence[tuple[float, float]]) -> None:
    """Raise ConfigError where sizes are all of one make-up: no times of them tell tokens and squares apart.

    Args:
        by: who asks, for the error.
        of: what they are the sizes of.
        sizes: (tokens > 0, sum of squared lengths) of each.
    """
    if len({squares / tokens for tokens, squares in sizes}) < 2:
        raise ConfigError(
            f"{by}: all {len(sizes)} {of} are of one make-up, {sizes[0][1] / sizes[0][0]:g} squares per token: their "
            "times do not tell what a token costs and what a square; give micro-batches of different lengths, as one "
            "long rollout, one short one, and many short ones"
        )


def _solved(rows: Sequence[Sequence[float]], used: Sequence[int]) -> list[float] | None:
    """Return the numbers >= 0 that bring the rows' products closest to 1, those that are not used 0; None without any.

    It needs no library, whose last digits would differ between processors: every rank must find the same.
    """
    scale = [max(row[column] for row in rows) for column in used]
    table = [[row[column] / most for column, most in zip(used, scale, strict=True)] for row in rows]
    size = len(used)
    normal = [
        [*(math.fsum(row[i] * row[j] for row in table) for j in range(size)), math.fsum(row[i] for row in table)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(normal[k][i]))
        normal[i], normal[pivot] = normal[pivot], normal[i]
        if abs(normal[i][i]) < 1e-9:
            return None
        for k in range(size):
            if k != i:
                factor = normal[k][i] / normal[i][i]
                normal[k] = [a - factor * b for a, b in zip(normal[k], normal[i], strict=True)]
    found = [0.0, 0.0, 0.0]
    for i, column in enumerate(used):
        found[column] = normal[i][size] / normal[i][i] / scale[i]
    return None if min(found) < 0 else found


def _error(rows: Sequence[Sequence[float]], fit: Sequence[float]) -> float:
    return math.fsum((math.fsum(a * b for a, b in zip(row, fit, strict=True)) - 1) ** 2 for row in rows)


def _number(name: str, value: Any) -> float:
    """Return a number as a float: whole ones would wrap in arrays of 64 bits."""
    number = _as_float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if number and not _LEAST <= number <= _MOST:
        raise ConfigError(
            f"Cost: {name} is {reprlib.repr(value)}: it must be 0, or a number from {_LEAST:g} to {_MOST:g}; only "
            "ratios matter, so choose another unit"
        )
    return number


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
