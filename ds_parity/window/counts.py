"""What a pass contained: on one rank, and over all data-parallel ranks."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Final

from ds_parity.errors import WindowError

# Ranks add the counts of a pass in int64, which wraps round without a word: with this limit only 8 million ranks could.
# Over passes they are added as Python's ints, which have no end. No micro-batch comes near it (10**12 tokens).
MOST: Final = 2**40


def whole(name: str, value: Any) -> int:
    """Return a count as a plain int, from an int, a NumPy integer or a whole-numbered tensor of one element on the CPU.

    Args:
        name: of the count, for the message.
        value: of it, from 0 to 2**40.

    Raises:
        WindowError: it is negative, above 2**40, fractional, NaN, a flag, a float, or a tensor off the CPU.
    """
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
    """What one rank's micro-batch contains, each number from 0 to 2**40.

    A whole-numbered tensor of one element on the CPU becomes a plain int.

    Raises:
        WindowError: a count is negative, above 2**40, fractional, NaN, a flag, a float, or a tensor off the CPU, which
            would have to be waited for.
    """

    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, whole(name, getattr(self, name)))

    def weight(self, unit: str) -> int:
        """How many units the micro-batch's mean loss stands for: its rollouts, its tokens, or 1."""
        if unit == "token":
            return self.tokens
        if unit == "pass":
            return int(self.active)
        return self.rollouts

    @property
    def active(self) -> bool:
        """Whether the pass is not idle: it finishes rollouts, or has loss tokens of one (a turn before its last)."""
        return self.rollouts > 0 or self.tokens > 0


@dataclass(frozen=True, slots=True)
class PassTotals:
    """What one pass contained over all data-parallel ranks; `active` is the number of ranks that were not idle."""

    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    active: int = 0

    @classmethod
    def of(cls, ranks: list[Counts]) -> PassTotals:
        """Sum the counts of every rank."""
        return cls(
            rollouts=sum(counts.rollouts for counts in ranks),
            prompts=sum(counts.prompts for counts in ranks),
            tokens=sum(counts.tokens for counts in ranks),
            active=sum(counts.active for counts in ranks),
        )

    def weight(self, unit: str) -> int:
        """The sum of the ranks' weights; a rank's `pass` weight is 1, so there it is the number of active ranks."""
        if unit == "pass":
            return self.active
        return self.tokens if unit == "token" else self.rollouts

    def contributes(self, unit: str) -> bool:
        """Whether the pass has a gradient: also one of turns that finish no rollout, under a weight of rollouts."""
        return self.weight(unit) > 0 or self.tokens > 0

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
    """

    passes: int = 0
    active: int = 0
    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    weight: float = 0
