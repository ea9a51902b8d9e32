"""How far and in which direction the weights moved, from their sketches.

A sketch is linear in the weights: what holds of weight vectors holds of their sketches, number by number. So a
difference of weights that is, say, a multiple of an update shows in every number of the sketch, and one that is not
hits such a line by chance in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_parity.parity.comparison.bounds import DRIFT, EPS, TURN
from ds_parity.parity.diagnosis.lengths import linear
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import StepRecord

Vector = NDArray[np.float64]
ABOUT = 0.25
"""How far a gradient or an update may be off behind the first step that differs: other weights have other gradients."""

# Fewer numbers than this lie near a plane by chance.
_ENOUGH = 8
# Momentum makes updates of SGD up to ten times as long as its gradients, where it is 0.9.
_OF_MOMENTUM = 30.0
_PLAIN = 1.4
# Updates before the last that Nesterov's momentum may still hold.
_OLDER = 3
_TOO_FAR = 3.0
_CLEAR = 10.0
_SURE = 2.0


@dataclass(frozen=True)
class Moves:
    """The weights of both runs, as far as a view holds them.

    Attributes:
        view: two traces side by side.
    """

    view: View

    @cached_property
    def known(self) -> bool:
        """Whether both sides hold a sketch of one length after every common step."""
        sides = [one.weights.sketch for pair in self.view.pairs for one in pair if one.weights is not None]
        return (
            len(sides) == 2 * len(self.view.pairs) > 0
            and len({len(it) for it in sides}) == 1
            and len(sides[0]) >= _ENOUGH
            and bool(np.isfinite(np.array(sides)).all())
        )

    def reference(self, at: int) -> Vector:
        """The reference's weights after a step; (n,) numbers of the sketch."""
        return _sketch(self.view.pairs[at][0])

    def apart(self, at: int) -> Vector:
        """Candidate - reference after a step; (n,)."""
        return _sketch(self.view.pairs[at][1]) - _sketch(self.view.pairs[at][0])

    @cached_property
    def starts(self) -> tuple[Vector, Vector] | None:
        """Both sides' weights before the first step, (n,) each; None where a header doesn't tell."""
        headers = self.view.reference.header, self.view.candidate.header
        sketches = [getattr(getattr(header, "start", None), "sketch", ()) for header in headers]
        if not self.known or any(len(it) != len(self.reference(0)) for it in sketches):
            return None
        # Excerpts of long traces begin in their middle.
        return None if self.view.step(0) != 1 else (np.array(sketches[0]), np.array(sketches[1]))

    @property
    def linear(self) -> bool:
        """Whether the headers say that both runs add gradients up as they are, as SGD does."""
        return bool(linear(self.view.reference.header, self.view.candidate.header))

    @property
    def one_start(self) -> bool:
        """Whether both sides are known to start from the same weights."""
        return self.starts is not None and bool((self.starts[0] == self.starts[1]).all())

    def update(self, at: int) -> Vector | None:
        """What the reference's step `at` added to its weights; (n,); None for the first where its start isn't known."""
        if at > 0:
            return self.reference(at) - self.reference(at - 1)
        return self.reference(0) - self.starts[0] if self.starts is not None and self.one_start else None

    def carried(self, at: int) -> list[Vector]:
        """What Nesterov's momentum and weight decay mix into the reference's update of a step; (n,) each."""
        older = [self.update(one) for one in range(max(0, at - _OLDER), max(0, at - 1))]
        return [it for it in (*older, self.reference(max(0, at - 1))) if it is not None]

    def widened(self, at: int) -> Vector:
        """By how much further a step took the weights apart; (n,)."""
        return self.apart(at) - self.apart(at - 1) if at > 0 else self.apart(0)

    @cached_property
    def first_stride(self) -> float | None:
        """How long the first update may be, by the later ones; None where no rates or no updates are known.

        An update is as long as its rate has it, and a rate that decays leaves later ones shorter. Where the first rate
        is small, as in a warm-up, the median of the others counts: what is logged may be the rate of another step.
        """
        rates = [max(a.lr, default=0.0) if a.lr else 0.0 for a, _ in self.view.pairs]
        lengths = [float(np.linalg.norm(self.reference(at) - self.reference(at - 1))) for at in self._later]
        later = sum(rates[at] for at in self._later)
        return max(float(np.median(lengths)), rates[0] * sum(lengths) / later) if later > 0 else None

    @cached_property
    def sgd(self) -> bool:
        """Whether the optimizer is SGD: by the headers, or by updates as long as gradients times the LR.

        What is read off lengths alone is no proof: a long gradient makes Adam look so, too.
        """
        if (named := linear(self.view.reference.header, self.view.candidate.header)) is not None:
            return named
        return bool(self._in_gradients) and float(np.median(self._in_gradients)) < _OF_MOMENTUM

    @cached_property
    def plain(self) -> bool:
        """Whether the reference's updates are gradients times the LR, without much momentum; a sketch errs by less."""
        return self.linear and bool(self._in_gradients) and max(self._in_gradients) < _PLAIN

    @cached_property
    def _in_gradients(self) -> list[float]:
        """How long the reference's later updates are: in gradients times the LR."""
        return [
            float(np.linalg.norm(self.reference(at) - self.reference(at - 1))) / (self._root * lr[0] * norm)
            for at in self._later
            for lr, norm in [(self.view.pairs[at][0].lr, self.view.pairs[at][0].grad_norm)]
            if lr and lr[0] and norm
        ]

    def clear(self, at: int) -> bool:
        """Whether weights lie so far apart after a step that rounding has no say in the direction."""
        update = self.update(at)
        dtype = self.view.comparison.dtype
        # What weights are stored in rounds them, and what gradients are computed in rounds each update.
        computed = 0.0 if update is None else EPS[dtype] * float(np.linalg.norm(update))
        return float(np.linalg.norm(self.widened(at))) > _CLEAR * max(self._stored(at), computed)

    def turned(self, at: int) -> bool:
        """Whether a step's update has another direction: more lies beside the reference's than rounding explains."""
        update = self.update(at) if self.known else None
        if update is None or not update.any():  # no update has no direction
            return False
        apart = self.widened(at)
        (share,), beside = along(apart, [update])
        return beside * float(np.linalg.norm(apart)) > self.rounding(at, abs(1 + share))

    def rounding(self, at: int, times: float) -> float:
        """How far rounding takes a step's update from the reference's, of which it is so many times as long.

        It is rounded as such. What the weights of the reference are rounded by, its update is off by, and this enters
        as often.
        """
        update, dtype = self.update(at), self.view.comparison.dtype
        length = 0.0 if update is None else float(np.linalg.norm(update))
        computed = DRIFT[dtype] + (0.0 if self.linear else TURN) if dtype in DRIFT else EPS[dtype]
        return max(computed * length * max(1.0, times), _SURE * float(np.hypot(1.0, times)) * self._stored(at))

    def _stored(self, at: int) -> float:
        """By how much the numbers of the sketches are rounded, because of the type that the traces tell of."""
        weights = self.view.pairs[at][0].weights
        assert weights is not None
        headers = self.view.reference.header, self.view.candidate.header
        types = [it.start.dtype if it.start is not None else self.view.comparison.dtype for it in headers]
        return max(EPS[it] for it in types) / 4 * weights.norm * self._root

    @property
    def too_far(self) -> bool:
        """Whether the first difference is too long for gradients of one direction; a sketch errs by a fifth.

        Gradients of one direction lie as far apart as their norms do, and enter less than twice with Nesterov's
        momentum.
        """
        a, b = self.view.pairs[self.view.first]
        if not (self.sgd and a.lr and a.lr[0] and a.grad_norm and b.grad_norm):
            return False
        apart = float(np.linalg.norm(self.widened(self.view.first))) / (self._root * max(a.lr))
        return self.clear(self.view.first) and apart > _TOO_FAR * abs(b.grad_norm - a.grad_norm)

    def of_gradient(self, at: int, times: float) -> float:
        """How long so many times the reference's gradient of a step is in a sketch, as SGD adds it; 0: not known."""
        step, _ = self.view.pairs[at]
        return abs(times) * self._root * max(step.lr or (0.0,)) * (step.grad_norm or 0.0)

    @property
    def _root(self) -> float:
        return float(np.sqrt(len(self.reference(0))))

    @property
    def _later(self) -> range:
        return range(1, len(self.view.pairs) if self.known else 1)


def along(vector: Vector, basis: Sequence[Vector]) -> tuple[list[float], float]:
    """Fit a vector by a sum of others.

    Args:
        vector: (n,) numbers.
        basis: others, (n,) each.

    Returns:
        The coefficients, and what they leave over of the vector as a share of its length; 1 for a vector of zeros.
    """
    length = float(np.linalg.norm(vector))
    matrix = np.array(basis).T
    if not length or not np.linalg.norm(matrix, axis=0).all():
        return [0.0] * len(basis), 1.0
    found: Any = np.linalg.lstsq(matrix, vector, rcond=None)[0]
    return [float(it) for it in found], float(np.linalg.norm(vector - matrix @ found)) / length


def _sketch(record: StepRecord) -> Vector:
    assert record.weights is not None
    return np.array(record.weights.sketch, dtype=np.float64)
