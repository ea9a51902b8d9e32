"""How far two records of a step may lie apart: the bound of their tier, and the digits that they were written with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ds_parity.parity.comparison.bounds import DRIFT, EPS, FAR, TURN, Bound, C, Tier, least_metric, least_norm
from ds_parity.parity.comparison.fields import BOUNDED
from ds_parity.parity.comparison.travel import Travelled
from ds_parity.trace import Precision
from ds_parity.trace.columns import Array
from ds_parity.trace.records import METRIC

BINARY = 1e-6
"""Of a value: what single precision leaves open is less, and what digits do that prove anything is more."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """What bounds depend on. Losses and metrics can be near 0, so `floors` are the greatest of the reference.

    What they are compared relative to (`scale`) is no less than `LEAST_LOSS` for losses, and `least_metric` for
    metrics, which may be differences of terms that are as large.

    A gradient can be near 0 too, where the rollouts of a window cancel, and is as exact as they are: its norm's floor
    is the median of the reference's, or more in long types (`least_norm`).

    `written` holds, per field, how the traces wrote it: a number that was rounded may be any that rounds to it.

    `stored` is how far weights lie apart by the type alone that the traces tell of them in (`stored_rounding`).
    `averaged` are the fields whose numbers are means of those that were written, and not rounded themselves.
    `turning` says that the optimizer may turn rounding into a whole step (`TURN`).
    """

    tier: Tier
    dtype: str
    eps: float
    floors: Mapping[str, float]
    left_out: frozenset[str]
    written: Mapping[str, tuple[Precision | None, Precision | None]]
    stored: float = 0.0
    turning: bool = True
    averaged: frozenset[str] = frozenset()

    def bounds(self, name: str) -> bool:
        """Whether a field may differ within a bound; else it must be equal bit for bit."""
        return self.tier is not Tier.EXACT and (name in BOUNDED or name.startswith(METRIC))

    def bound(self, name: str, terms: float) -> Bound:
        """What adding the same terms in another order explains; a metric is a weighted mean of them, as the loss is."""
        return Bound(C[self.dtype]["loss" if name.startswith(METRIC) else name], self.eps, terms)

    def explained(self, roots: Array, way: Travelled) -> Array:
        """How far weights may lie apart (>= 0, relative to their norm) by the way that they have come (`DRIFT`).

        Args:
            roots: the square roots of the rollouts summed up; (n,).
            way: of the reference's weights; n.

        Returns:
            (n,), NaN where the way isn't known, and everywhere of types that are not short.
        """
        if self.dtype not in DRIFT:
            return np.full(roots.shape, np.nan)
        moved = DRIFT[self.dtype] * way.path * (1 + way.path / FAR) + (TURN * way.spread if self.turning else 0.0)
        return np.asarray(C["fp32"]["weights"] * EPS["fp32"] * roots + moved + self.stored)

    def scale(self, name: str) -> float:
        """What differences of a field are at least relative to: a number that was rounded to 0 is no nearer to it."""
        rounded = (it.slack(0.0) for it in self.written.get(name, ()) if it is not None)
        floor = self.floors.get(name, 0.0)
        if name.startswith(METRIC):
            floor = max(floor, least_metric(name.removeprefix(METRIC), self.dtype))
        elif name == "grad_norm":
            floor = least_norm(floor, self.dtype)
        return max(floor, *rounded, 0.0)

    def digits(self, name: str) -> str:
        """How a field was written, for a sentence; empty where it was in full."""
        known = [str(precision) for precision in self.written.get(name, ()) if precision is not None]
        return " and ".join(dict.fromkeys(known))

    def one_grid(self, name: str, reference: Array, candidate: Array) -> Array:
        """Where both numbers were rounded to the same places: equal ones come out equal; of their shape."""
        a, b = self.written.get(name, (None, None))
        if a is None or b is None or name in self.averaged:
            return np.zeros(reference.shape, dtype=bool)
        pairs = zip(reference.ravel().tolist(), candidate.ravel().tolist(), strict=True)
        return np.array([a.one_grid(x, b, y) for x, y in pairs], dtype=bool).reshape(reference.shape)

    def slack(self, name: str, reference: Array, candidate: Array) -> Array:
        """How far numbers may lie apart (>= 0, absolute) by the digits that they were written with; of their shape.

        What must be equal, and was rounded to one grid, is equal there: only its binary number is left open.
        """
        slack = self._open(name, Precision.slack, reference, candidate)
        if self.bounds(name):
            return slack
        noise = self._open(name, Precision.noise, reference, candidate)
        return np.where(self.one_grid(name, reference, candidate), noise, slack)

    def _open(self, name: str, of: Callable[[Precision, float], float], reference: Array, candidate: Array) -> Array:
        """What the precisions of both sides leave open together, one of them by `of`; of the arrays' shape."""
        found = np.zeros(reference.shape)
        for precision, values in zip(self.written[name], (reference, candidate), strict=True):
            if precision is not None:
                found += np.array([of(precision, it) for it in values.ravel().tolist()]).reshape(values.shape)
        return found
