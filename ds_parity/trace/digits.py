"""How many digits a column of numbers was written with: a number that was rounded stands for an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

_DOUBLE, _SINGLE = 15, 6  # the decimal digits that every double, every single keeps


@dataclass(frozen=True, slots=True)
class Precision:
    """How numbers were written: decimals or significant digits, in single precision or not; None: not rounded so."""

    decimals: int | None = None
    significant: int | None = None
    single: bool = False

    def slack(self, value: float) -> float:
        """How far (>= 0) the number that was written as `value` may lie from it; 0 for NaN and the infinities."""
        return 0.5 * self.unit(value) + self.noise(value)

    def unit(self, value: float) -> float:
        """The distance (>= 0) of numbers that are written so next to `value`; 0 where no digits were left out."""
        if self.decimals is not None and math.isfinite(value):
            return 10.0**-self.decimals
        if self.significant is not None and math.isfinite(value) and value:
            return float(10.0 ** (math.floor(math.log10(abs(value))) - self.significant + 1))
        return 0.0

    def noise(self, value: float) -> float:
        """What is left open (>= 0) by the binary number that `value` was held in; 0 for NaN and the infinities."""
        if not math.isfinite(value):
            return 0.0
        return math.ulp(value) + (max(abs(value) * 2.0**-24, 2.0**-150) if self.single else 0.0)

    def one_grid(self, value: float, other: Precision, another: float) -> bool:
        """Whether `value`, and `another` that was written with the `other` precision, lie on one decimal grid."""
        digits = self.decimals, self.significant
        if digits == (other.decimals, other.significant):
            return digits != (None, None)
        return self.unit(value) == other.unit(another) > 0

    def __str__(self) -> str:
        rounded = [f"{self.decimals} decimals"] * (self.decimals is not None)
        rounded += [f"{self.significant} significant digits"] * (self.significant is not None)
        return " and ".join([*rounded, *["single precision"] * self.single])


@dataclass(frozen=True, slots=True)
class _Written:
    decimals: int
    significant: int
    padded: bool  # it ends in a zero that only a fixed number of digits explains
    exponent: bool = False  # it is written with a power of ten


@dataclass(frozen=True, slots=True)
class Digits:
    """The distinct texts of one column."""

    texts: set[str] = field(default_factory=set)

    def add(self, text: str) -> None:
        """Take in the text of one more number."""
        self.texts.add(text)

    def precision(self, single: bool = False) -> Precision | None:
        """What the column was rounded to; None where it was written in full, or nothing tells.

        Rounded numbers use their last digit nine times out of ten. So the last place counts as one of rounding where
        two different numbers and half of these use it, or where zeros were written to fill it: a constant 0.001 may be
        just that. One significant digit is only fixed by an exponent (1e-05, 9e-06), so 0.001 and 0.0005 are what they
        are. Whether decimals or significant digits were fixed is told by what more of the numbers use.

        Args:
            single: the numbers were held in single precision.
        """
        known = [written for written in map(_written, self.texts) if written is not None]
        decimals = max((it.decimals for it in known), default=0)
        significant = max((it.significant for it in known), default=0)
        fixed = sum(it.decimals == decimals for it in known)
        floating = sum(it.significant == significant and (significant > 1 or it.exponent) for it in known)
        used = max(fixed, floating)
        evident = any(it.padded for it in known) or (used >= 2 and 2 * used >= len(known))
        if decimals <= 0 or significant > (_SINGLE if single else _DOUBLE) or not evident:
            return Precision(single=True) if single else None
        if fixed >= floating:
            return Precision(decimals=decimals, single=single)
        return Precision(significant=significant, single=single)


def _written(text: str) -> _Written | None:
    """None where a text tells nothing of digits: NaN, the infinities, a plain zero, an exponent beyond all bounds."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int):
        return None
    mantissa, separator, power = text.lower().partition("e")
    if mantissa.endswith(".0"):  # a whole number, as Python writes it
        number = Decimal(mantissa[:-2] + separator + power)
        exponent = int(number.as_tuple().exponent)
    digits = number.as_tuple().digits
    if not number:
        return _Written(-exponent, 1, padded=True) if exponent < -1 else None
    return _Written(-exponent, len(digits), padded=exponent < 0 and digits[-1] == 0, exponent=bool(separator))
