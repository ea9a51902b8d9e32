"""What a pass contained: on one rank, and over all data-parallel ranks."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, Final

from ds_parity.errors import WindowError

# Ranks add the counts of a pass in int64, which wraps round without a word: with this limit only 8 million ranks could.
# Over passes they are added as Python's ints, which have no end. No micro-batch comes near it (10**12 tokens).
MOST: Final = 2**40
COUNTED: Final = ("rollouts", "prompts", "tokens")


def whole(name: str, value: Any) -> int:
    """Return a count as a plain int, from an int, a NumPy integer or a whole-numbered tensor of one element on the CPU.

    Args:
        name: of the count, for the message.
        value: of it, from 0 to 2**40.

    Raises:
        WindowError: it is negative, above 2**40, fractional, NaN, a flag, a float, or a tensor off the CPU.
    """
    if type(value) is int and 0 <= value <= MOST:  # what nearly every pass gives
        return value
    _refuse_unreadable(name, value)
    # Torch's flags, unlike numpy's, say that they are whole numbers; only their type tells.
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise WindowError(f"{name} is {value!r}: a count must be a whole number >= 0; pass how many, not whether")
    try:
        number = operator.index(value)
    except TypeError:
        raise WindowError(
            f"{name} is {value!r}: a count must be a whole number >= 0; pass an int, int(mask.sum()) where a mask "
            "holds floats (a NaN or a fraction here means that the data path miscounted)"
        ) from None
    if number < 0:
        raise WindowError(f"{name} is {number}: a count must be >= 0; pass 0 for an idle pass")
    if number > MOST:
        raise WindowError(
            f"{name} is {number}: a count must be <= {MOST}; pass how many the micro-batch contains (so large a number "
            "means that the data path miscounted)"
        )
    return number


def weight_of(value: Any) -> float:
    """Return a weight as a plain float, from a number or a real tensor of one element on the CPU.

    Args:
        value: finite and >= 0.

    Raises:
        WindowError: it is negative, NaN, infinite, a flag, no number, or a tensor off the CPU.
    """
    _refuse_unreadable("weight", value)
    rule = "a weight must be a finite number >= 0; pass what the micro-batch's mean loss stands for, 0 for an idle pass"
    if isinstance(value, bool | str | bytes) or "bool" in str(getattr(value, "dtype", "")):
        raise WindowError(f"weight is {value!r}: {rule}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise WindowError(f"weight is {value!r}: {rule}") from None
    if not 0 <= number < math.inf:
        raise WindowError(f"weight is {number!r}: {rule}")
    return number


def _refuse_unreadable(name: str, value: Any) -> None:
    # Torch isn't imported here. What of NumPy's has a device calls it by a plain string.
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if device != "cpu":
        raise WindowError(
            f"{name} is a tensor on {device!r}: reading it would wait for all work that is queued there, in every "
            "pass; count on the host, before the micro-batch is moved, or pass int(...) or .item() of it where waiting "
            "is accepted"
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """What one rank's micro-batch contains, each count from 0 to 2**40; and what it weighs where its caller says so.

    A whole-numbered tensor of one element on the CPU becomes a plain int.

    Attributes:
        rollouts: that it finishes.
        prompts: that it finishes.
        tokens: loss tokens of it.
        weights: what its caller says that it weighs (`loss_weight: weight`), or what each term of its loss weighs
            (`terms`): finite and >= 0; empty where all are 0.
        lacks: names of the terms that its caller gives the weight 0. Others may weigh 0, too, and are a part of their
            rollout's loss: of a turn that is not its last, where losses are sums.
        usual: its caller has not said how many rollouts, so that these are the usual number.

    Raises:
        WindowError: a count is negative, above 2**40, fractional, NaN, a flag, a float, or a tensor off the CPU, which
            would have to be waited for; or the weight is none.
    """

    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    weights: tuple[float, ...] = ()
    lacks: frozenset[str] = field(default=frozenset(), compare=False)
    usual: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in COUNTED:
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        weights = tuple(weight_of(weight) for weight in self.weights)
        object.__setattr__(self, "weights", weights if any(weights) else ())

    def __repr__(self) -> str:
        # Weights are shown where there are some.
        weights = f", weights={self.weights}" if self.weights else ""
        return f"Counts(rollouts={self.rollouts}, prompts={self.prompts}, tokens={self.tokens}{weights})"

    def in_units(self, unit: str) -> float:
        """How many units the micro-batch's mean loss stands for: its rollouts, its tokens, its weight, or 1."""
        if unit == "token":
            return self.tokens
        if unit == "weight":
            return sum(self.weights)
        if unit == "pass":
            return int(self.active)
        return self.rollouts

    @property
    def active(self) -> bool:
        """Whether the pass is not idle: it finishes rollouts, has loss tokens (a turn before its last), or weighs."""
        return self.rollouts > 0 or self.tokens > 0 or bool(self.weights)


@dataclass(frozen=True, slots=True)
class PassTotals:
    """What one pass contained over all data-parallel ranks; `active` is the number of ranks that were not idle."""

    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    active: int = 0
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, ranks: list[Counts]) -> PassTotals:
        """Sum the counts of every rank."""
        return cls(
            rollouts=sum(counts.rollouts for counts in ranks),
            prompts=sum(counts.prompts for counts in ranks),
            tokens=sum(counts.tokens for counts in ranks),
            active=sum(counts.active for counts in ranks),
            weights=added(*(counts.weights for counts in ranks)),
        )

    def in_units(self, unit: str) -> float:
        """The sum of the ranks' weights; a rank's `pass` weight is 1, so there it is the number of active ranks."""
        if unit == "pass":
            return self.active
        if unit == "weight":
            return sum(self.weights)
        return self.tokens if unit == "token" else self.rollouts

    def contributes(self, unit: str) -> bool:
        """Whether the pass has a gradient: also one of turns that finish no rollout, under a weight of rollouts."""
        return self.in_units(unit) > 0 or self.tokens > 0

    def counted(self, count: str) -> int:
        """The units that bring the window nearer to its target: rollouts or prompts."""
        return self.prompts if count == "prompt" else self.rollouts


@dataclass(frozen=True, slots=True)
class WindowTotals:
    """What a window that its caller has ended contains over all data-parallel ranks.

    Attributes:
        passes: the most that a rank has run.
        active: micro-batches that were not idle.
        rollouts: finished in them.
        prompts: finished in them.
        tokens: loss tokens that they contained.
        weight: sum of their weights.
        weights: the same one by one, where micro-batches bring them or terms have them.
    """

    passes: int = 0
    active: int = 0
    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    weight: float = 0
    weights: tuple[float, ...] = ()


def added(*weights: tuple[float, ...]) -> tuple[float, ...]:
    """Return the sums of weights place by place; an empty tuple stands for zeros."""
    there = [one for one in weights if one]
    return tuple(map(sum, zip(*there, strict=True))) if there else ()
