"""How far two records of one step may lie apart: the bound of their tier, and the digits that they were written with."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_parity.parity.comparison.bounds import Bound, C, Tier, gap
from ds_parity.parity.comparison.fields import Field, How, value_of
from ds_parity.trace import Precision, StepRecord
from ds_parity.trace.records import METRIC


@dataclass(frozen=True, slots=True)
class Pair:
    """What both traces say of one step; `terms` rollouts were summed up to and including it."""

    step: int
    reference: StepRecord | None
    candidate: StepRecord | None
    terms: int

    def values(self, name: str) -> tuple[object, object]:
        """A field's value in both traces, None where absent."""
        return value_of(self.reference, name), value_of(self.candidate, name)


@dataclass(frozen=True, slots=True)
class Ruler:
    """What bounds depend on. Losses and metrics can be near 0, so `floors` are the greatest of the reference.

    A gradient can be near 0 too, where the rollouts of a window cancel, and is as exact as they are: its norm's floor is
    the median of the reference's.

    `written` holds, per field, how the traces wrote it: a number that was rounded may be any that rounds to it.
    """

    tier: Tier
    dtype: str
    eps: float
    floors: Mapping[str, float]
    left_out: frozenset[str]
    written: Mapping[str, tuple[Precision | None, Precision | None]]

    def bounds(self, field: Field) -> bool:
        """Whether a field may differ within a bound; else it must be equal bit for bit."""
        return self.tier is not Tier.EXACT and field.how is How.BOUNDED

    def bound(self, name: str, terms: float) -> Bound:
        """What adding the same terms in another order explains; a metric is a weighted mean of them, as the loss is."""
        return Bound(C[self.dtype]["loss" if name.startswith(METRIC) else name], self.eps, terms)

    def gap(self, pair: Pair, name: str) -> float | None:
        """How far a field lies apart, None where a trace lacks it."""
        a, b = pair.values(name)
        return None if a is None or b is None else gap(a, b, self.scale(name))

    def scale(self, name: str) -> float:
        """What a field's differences are at least relative to: a number that was rounded to 0 is no nearer than that."""
        if not self.written:
            return self.floors.get(name, 0.0)
        rounded = (it.slack(0.0) for it in self.written.get(name, ()) if it is not None)
        return max(self.floors.get(name, 0.0), *rounded, 0.0)

    def limit(self, pair: Pair, name: str) -> float:
        """The relative difference that a bounded field may have in a step."""
        return self.bound(name, pair.terms).relative + self.slack(pair, name)

    def digits(self, name: str) -> str:
        """How a field was written, for a sentence; empty where it was in full."""
        known = [str(precision) for precision in self.written.get(name, ()) if precision is not None]
        return " and ".join(known)

    def slack(self, pair: Pair, name: str) -> float:
        """What the digits of both traces leave open, relative as `gap` is; 0 where there is nothing to relate it to."""
        if name not in self.written:
            return 0.0
        parts = ((self._slack(name, a, b), max(abs(a), self.scale(name))) for a, b in self._floats(pair, name))
        return max((slack / scale for slack, scale in parts if 0 < scale < math.inf), default=0.0)

    def excused(self, pair: Pair, name: str, relative: float = 0.0) -> bool:
        """Whether the digits that were written, and beside them a relative bound, explain the difference of a field."""
        a, b = pair.values(name)
        if name not in self.written or (isinstance(a, tuple) and isinstance(b, tuple) and len(a) != len(b)):
            return False
        return all(self._near(name, x, y, relative) for x, y in self._floats(pair, name))

    def _near(self, name: str, a: float, b: float, relative: float) -> bool:
        if not (math.isfinite(a) and math.isfinite(b)):
            return a == b
        return abs(a - b) <= relative * max(abs(a), self.scale(name)) + self._slack(name, a, b)

    def _slack(self, name: str, a: float, b: float) -> float:
        precisions = self.written.get(name, (None, None))
        return sum(it.slack(x) for it, x in zip(precisions, (a, b), strict=True) if it is not None)

    def _floats(self, pair: Pair, name: str) -> Iterator[tuple[float, float]]:
        a, b = pair.values(name)
        if isinstance(a, tuple) and isinstance(b, tuple):
            yield from zip(a, b, strict=False)
        elif isinstance(a, float) and isinstance(b, float):
            yield a, b
