"""Known faults whose figures a reference has computed: named where the candidate's step has exactly these figures.

Up to the first step that differs both runs have the same weights. So what a fault makes of that step is known to
rounding: its loss, its gradient norm, and where its weights lie after the step. Later steps begin from other weights,
and only tell whether the fault stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_parity.parity.comparison.bounds import DRIFT, EPS, TURN, Bound, C
from ds_parity.parity.diagnosis.causes import Cause
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.meanings import COMPUTED, MEANINGS
from ds_parity.parity.diagnosis.moves import Moves, Vector
from ds_parity.parity.diagnosis.view import View
from ds_parity.trace import Hypothesis

# What a hypothesis changes must be this many times what rounding may change, or it can't be told from others: a norm is
# one number, and weights that fit so nearly have the direction of the hypothesis in eight.
_CLEAR, _CLEAR_WEIGHTS = 10.0, 5.0
# Norms that are rounded more let the weights come apart in steps that seem equal.
_WIDE = 1e-3
# In the place of `C`, which is that of Adam: its own weights lie within 0.085 of the unit of a bound.
_OF_SGD = 0.3
# Later norms are off by about: a hypothesis is dropped for another that is so many times nearer.
_NEARER, _ABOUT = 3.0, 0.02
_LEAST = 0.02  # of a loss
_LONGER = 2.0  # than a norm is by rounding
_FOLDED, _WIDTH = 8, 32  # numbers of a hypothesis, and of the sketch that they are sums of
_OF_APART = 0.01  # numbers of a hypothesis have four digits, and an update is as exact as its gradient


def causes(view: View) -> Iterator[Cause]:
    """Yield the faults whose figures the first step that differs has, if these are one fault's alone."""
    test = FirstStep(view)
    fitting = test.fitting
    if not fitting:
        yield from _of_a_part(test)
    elif _alike([test.hypotheses[name] for name in fitting]):
        names = dict.fromkeys(cause for name in fitting for cause in test.causes_of(name))
        said = test.said(fitting)
        yield from (Cause(name, Fit.COMPUTED, said) for name in names)


def _of_a_part(test: FirstStep) -> Iterator[Cause]:
    """A part of the loss alone is weighed otherwise: gradient and weights have gone that part of the way."""
    parts = {name: part for name in test.hypotheses for part in test.parts(name)}
    if parts and _alike([test.hypotheses[name] for name in parts]):
        name, part = next(iter(parts.items()))
        said = f"{part:.6g} of step {test.view.step(test.view.first)} is that of {MEANINGS[name].words}: gradient norm"
        yield Cause("aux-term-scaled-apart", Fit.COMPUTED, f"{said} and weights are what this comes to")


def undecided(view: View) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the faults whose figures the step may have, and those that a reference has computed in vain."""
    test = FirstStep(view)
    if not test.hypotheses or (view.pairs[view.first][1].grad_norm is None and test.apart is None):
        return (), frozenset()
    if view.first and view.comparison.bound("grad_norm", 1) > _WIDE:
        return (), frozenset()
    may_be = tuple(dict.fromkeys(cause for name in test.fitting for cause in test.causes_of(name)))
    part = {"aux-term-scaled-apart"} if test.moves.known and test.moves.sgd else set()
    return may_be, (COMPUTED | part) - frozenset(may_be)


def _alike(found: Sequence[Hypothesis]) -> bool:
    """Whether hypotheses are the same but for rounding in fp64: they are one in this data."""
    return all(
        one.loss == found[0].loss
        and abs((one.grad_norm or 0.0) - (found[0].grad_norm or 0.0)) <= 1e-8 * abs(one.grad_norm or 0.0)
        and np.allclose(one.apart, found[0].apart, rtol=1e-2, atol=0.0)
        for one in found
    )


@dataclass(frozen=True)
class FirstStep:
    """The first step that differs, beside what a reference says that it would be."""

    view: View

    @cached_property
    def moves(self) -> Moves:
        """The weights of both runs."""
        return Moves(self.view)

    @cached_property
    def hypotheses(self) -> Mapping[str, Hypothesis]:
        """What was computed for this step; nothing where something else than loss, gradient and weights differs."""
        view = self.view
        if view.first == len(view.pairs) or not view.at_first or not view.at_first <= {"loss", "grad_norm", "weights"}:
            return {}
        found = view.pairs[view.first][0].hypotheses or {}
        return {name: it for name, it in found.items() if name.partition(":")[0] in MEANINGS}

    @cached_property
    def fitting(self) -> tuple[str, ...]:
        """The names of hypotheses whose figures the candidate's step has."""
        if self.view.trained_alike:
            return ()
        found = [name for name, it in self.hypotheses.items() if self._fits(name, it)]
        # Several may be one and the same in this step, and others later, where weights are off by about.
        missed = {name: self._missed(name) for name in found}
        least = min(missed.values(), default=0.0)
        return tuple(name for name in found if missed[name] <= _NEARER * least + _ABOUT)

    def _missed(self, name: str) -> float:
        """How far later norms lie from those of a hypothesis, or from the right ones where these are nearer."""
        ratios = self._later(name)
        return min(sum(abs(it) for it, _ in ratios), sum(abs(right) for _, right in ratios))

    def _later(self, name: str) -> list[tuple[float, float]]:
        """Return how far later norms lie from a hypothesis', and from the right ones, as logarithms of ratios."""
        found = []
        for a, b in self.view.pairs[self.view.first + 1 :]:
            it = (a.hypotheses or {}).get(name)
            norm = a.grad_norm if it is None else it.grad_norm  # one that makes no difference is not recorded
            if a.hypotheses is not None and norm and a.grad_norm and b.grad_norm:
                of_fault, of_right = b.grad_norm / norm, b.grad_norm / a.grad_norm
                if 0 < of_fault < np.inf and 0 < of_right < np.inf:  # a norm may be anything in another trainer's log
                    found.append((float(np.log(of_fault)), float(np.log(of_right))))
        return found

    def _fits(self, name: str, it: Hypothesis) -> bool:
        a, b = self.view.pairs[self.view.first]
        if name.partition(":")[0] not in MEANINGS:
            return False
        if it.loss is None or b.loss is None or a.loss is None:
            loss = "loss" not in self.view.at_first
        else:
            # What is logged may be the right loss all the same: a loop that weighs gradients otherwise logs its own.
            loss = self._near("loss", b.loss, it.loss) or "loss" not in self.view.at_first
        norm = b.grad_norm is None or (it.grad_norm is not None and self._near("grad_norm", b.grad_norm, it.grad_norm))
        if not (loss and norm):
            return False
        weights = self._weights(it)
        told = b.grad_norm is not None and self._clear(a.grad_norm, it.grad_norm)
        return weights is True or (weights is None and told)

    def _near(self, field: str, value: float, other: float) -> bool:
        return abs(value - other) <= self._allowed(field, other)

    def _allowed(self, field: str, value: float) -> float:
        least = 0.5 if field == "loss" else 0.0
        return self._bound(field) * max(abs(value), least)

    def _bound(self, field: str) -> float:
        dtype = self.view.comparison.dtype
        return Bound(C[dtype][field], EPS[dtype], self._rollouts).relative

    @cached_property
    def _rollouts(self) -> int:
        """Those of all steps up to this one, over which rounding adds up."""
        return sum(one.rollouts or 1 for one, _ in self.view.pairs[: self.view.first + 1])

    def _clear(self, right: float | None, other: float | None) -> bool:
        """Whether a norm lies so far from the right one that rounding does not matter."""
        if right is None or other is None:
            return False
        return abs(other - right) > _CLEAR * self._allowed("grad_norm", right)

    def _weights(self, it: Hypothesis) -> bool | None:
        """Whether the weights lie where a hypothesis has them; None where that is not known, or tells nothing."""
        predicted = np.array(it.apart)
        found = self.apart
        if found is None or len(predicted) != len(found):
            return None
        rounding, length = self.rounding, float(np.linalg.norm(predicted))
        if length <= _CLEAR_WEIGHTS * rounding:
            return None if float(np.linalg.norm(found)) <= 2 * _CLEAR_WEIGHTS * rounding else False
        return float(np.linalg.norm(found - predicted)) <= rounding + _OF_APART * length

    @cached_property
    def apart(self) -> Vector | None:
        """Candidate - reference after the step, as hypotheses have it; None where sketches are not known."""
        moves, at = self.moves, self.view.first
        if not moves.known or len(moves.reference(0)) != _WIDTH:
            return None
        before = moves.apart(at - 1) if at > 0 else np.zeros_like(moves.reference(0))
        return np.asarray((moves.apart(at) - before).reshape(-1, _FOLDED).sum(0))

    @cached_property
    def rounding(self) -> float:
        """How far such a difference may be off by rounding."""
        moves, at, dtype = self.moves, self.view.first, self.view.comparison.dtype
        weights = self.view.pairs[at][0].weights
        assert weights is not None
        root = float(np.sqrt(len(moves.reference(0))))
        constant = _OF_SGD if moves.sgd else C["fp32"]["weights"]
        stored = Bound(constant, EPS["fp32"], self._rollouts).relative * weights.norm * root
        update = moves.update(at)
        if dtype not in DRIFT or update is None:
            return stored
        return stored + (DRIFT[dtype] + (0.0 if moves.sgd else TURN)) * float(np.linalg.norm(update))

    def causes_of(self, name: str) -> tuple[str, ...]:
        """Return what follows from a hypothesis that fits, by how long it stays."""
        return *self._by_how_long(name), *self._of_data(name)

    def _of_data(self, name: str) -> tuple[str, ...]:
        """Return what gives all ranks the loss of one: the same micro-batches on each, if no count shows others."""
        (a, b), it = self.view.pairs[self.view.first], self.hypotheses[name]
        if None in (a.loss, b.loss, it.loss) or "loss" not in self.view.at_first or self.view.recorded("tokens"):
            return ()
        return ("data-or-seed",) if "late-boundary" in MEANINGS[name.partition(":")[0]].always else ()

    def _by_how_long(self, name: str) -> tuple[str, ...]:
        meaning = MEANINGS[name.partition(":")[0]]
        stays = self._stays(name)
        if stays is None:
            return tuple(dict.fromkeys((*(meaning.later if self.view.first else meaning.always), *meaning.once)))
        if not stays and meaning.once:
            return meaning.once
        return meaning.later if self.view.first and meaning.later else meaning.always

    def _stays(self, name: str) -> bool | None:
        """Whether later norms are nearer to those of the hypothesis than to the right ones; None: they don't tell."""
        ratios = self._later(name)
        for_it, against = (sum(abs(pair[at]) for pair in ratios) for at in (0, 1))
        return None if for_it == against else for_it < against

    def parts(self, name: str) -> Iterator[float]:
        """Yield which part of the loss a hypothesis about its shares would be true of, for norm and weights to fit.

        The gradient is then (1 - part) of the right one and the rest of the hypothesis'.
        """
        it, (a, b) = self.hypotheses[name], self.view.pairs[self.view.first]
        shares = name in MEANINGS and MEANINGS[name].of_shares
        known = it.along is not None and it.grad_norm and a.grad_norm and b.grad_norm
        if not (shares and known and self.moves.sgd) or self.apart is None or self.view.trained_alike:
            return
        # A mean of two gradients is no longer than the longer one; what is not finite, or very large, is no such mean.
        if not 0 < b.grad_norm < _LONGER * max(a.grad_norm, it.grad_norm) < math.inf:  # type: ignore[operator,type-var]
            return
        square, along = (it.grad_norm / a.grad_norm) ** 2, it.along  # type: ignore[operator]
        wanted = (b.grad_norm / a.grad_norm) ** 2  # type: ignore[operator]
        predicted = np.array(it.apart)
        for root in np.roots([1 - 2 * along + square, 2 * (along - 1), 1 - wanted]):  # type: ignore[operator]
            part = float(root.real)
            length = part * float(np.linalg.norm(predicted))
            if not (abs(root.imag) < 1e-6 and _LEAST < part < 1 - _LEAST and length > _CLEAR_WEIGHTS * self.rounding):
                continue
            if float(np.linalg.norm(self.apart - part * predicted)) <= self.rounding + _OF_APART * length:
                yield part

    def said(self, names: Sequence[str]) -> str:
        """Return whose figures the step has, in a sentence."""
        a, b = self.view.pairs[self.view.first]
        it = self.hypotheses[names[0]]
        words = dict.fromkeys(MEANINGS[name.partition(":")[0]].words for name in names)
        parts = []
        if it.grad_norm is not None and b.grad_norm is not None and a.grad_norm is not None:
            parts.append(f"gradient norm {b.grad_norm:.7g} (predicted {it.grad_norm:.7g}, right {a.grad_norm:.7g})")
        if it.loss is not None and "loss" in self.view.at_first:
            parts.append(f"loss {b.loss:.7g} (predicted {it.loss:.7g}, right {a.loss:.7g})")
        if self._weights(it):
            parts.append("the weights")
        return f"step {a.step} is that of {', or '.join(words)}: {', '.join(parts)}"
