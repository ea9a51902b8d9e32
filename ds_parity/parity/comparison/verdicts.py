"""The verdict on two traces in words: equal, equal but for rounding, or different; and what equality is worth."""

from __future__ import annotations

from collections.abc import Callable

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.fields import Comparison

ROUNDING = "equal but for rounding"


def within_rounding(comparison: Comparison, again: Callable[[], Comparison]) -> Comparison | None:
    """Return the comparison in whose bounds every difference is one of rounding; None where one is more, or none is.

    Args:
        comparison: of two traces.
        again: compares them in the REASSOCIATED tier; called where the EXACT tier found differences.
    """
    if comparison.equal:
        return comparison if comparison.rounded else None
    if comparison.tier is not Tier.EXACT:
        return None
    wider = again()
    # What the wider tier leaves out, such as the loss scale, has no bound that could explain a difference.
    unbounded = {difference.name for difference in comparison.found} & {*wider.not_compared}
    return wider if wider.equal and not unbounded else None


def verdict_of(comparison: Comparison, rounding: Comparison | None) -> str:
    """Return the verdict as a sentence without its end.

    Args:
        comparison: of two traces.
        rounding: what `within_rounding` says of it.
    """
    words = "equal" if comparison.equal else "the traces differ"
    if rounding is not None:
        within = ": every difference is within the reassociated bounds, and the exact tier allows none"
        words = ROUNDING + ("" if comparison.equal else within)
    little = (rounding or comparison).proves_little
    if little and (comparison.equal or rounding is not None):
        words += f", but this proves little: {'; '.join(little)}"
    return words
