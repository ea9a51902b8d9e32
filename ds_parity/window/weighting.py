"""How the losses of a window are weighed: chosen once, as a value of its own."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ds_parity.window.counts import Counts, PassTotals
from ds_parity.window.terms import Terms

DIVIDED = "divided"
TERMS = "terms"


@dataclass(frozen=True, slots=True)
class Weighting:
    """What a micro-batch's loss weighs in its step, and whether the step's denominator is a constant.

    Attributes:
        name: as in the configuration: `rollout`, `token`, `pass`, `target`, `weight` (each micro-batch brings its own)
            or `divided`: the caller has divided every loss for the step itself, so that passes add up.
        reduction: `mean` (a loss is a mean over its weight units) or `sum` (it is their sum).
        constant: total of every window that has a weight (> 0), where it does not follow from what the window holds.
        terms: the terms of the loss, where it has several; a micro-batch weighs what all of them weigh, and where they
            have different units each is divided by its own total as it goes in, so that the constant is 1.
    """

    name: str = "rollout"
    reduction: str = "mean"
    constant: float | None = None
    terms: Terms | None = None

    @classmethod
    def of_terms(cls, terms: Terms, loss_reduction: str) -> Weighting:
        """Return the weighting of a loss of several terms."""
        return cls(TERMS, loss_reduction, None if terms.alike else 1.0, terms)

    @classmethod
    def configured(cls, loss_weight: str, loss_reduction: str, target: int) -> Weighting:
        """Return the weighting that a configuration names; `target` (>= 1) is the total of `loss_weight: target`."""
        return cls(loss_weight, loss_reduction, float(target) if loss_weight == "target" else None)

    @classmethod
    def divided(cls, ranks: int, across_ranks: str = "mean") -> Weighting:
        """Return the weighting of losses that their caller has divided: a pass enters with weight 1.

        Args:
            ranks: data-parallel ranks (>= 1).
            across_ranks: `sum`: by a denominator of all ranks, so that their gradients add up; `mean`: they are
                averaged, because the caller divided by its own rank's denominator, or multiplied by the ranks.
        """
        return cls(DIVIDED, "mean", 1.0 if across_ranks == "sum" else float(ranks))

    @property
    def described(self) -> str:
        """What the total of a window counts, in words."""
        if self.name == DIVIDED:
            return "weight of divided losses"
        return "weight" if self.unit == "weight" else f"{self.name} weight"

    def over_rollouts(self, given: Set[str] | None = None) -> bool:
        """Whether a loss, or one of its `given` terms (None: all), is a mean over the rollouts that it finishes."""
        units = {term.unit for term in self.terms if given is None or term.name in given} if self.terms else {self.name}
        return self.reduction == "mean" and bool(units & {"rollout", "target"})

    def of(self, counts: Counts | PassTotals) -> float:
        """Return the weight of a micro-batch, or the sum of the weights of a pass over all ranks (>= 0)."""
        return counts.in_units(self.unit)

    def silences(self, counts: Counts) -> bool:
        """Whether a micro-batch contributes nothing to its step: no weight, and no part of a summed loss."""
        # A weight of its own that is 0 was given as 0; one that follows from counts is 0 for a turn that finishes none.
        part = self.reduction == "sum" and counts.tokens and self.name != "weight"
        return self.of(counts) == 0 and not part

    def divisor(self, expected: float, counts: Counts, averaged_over: int, peers: int = 1) -> float:
        """Return what a loss is divided by, so that DeepSpeed's reduction leaves weight * grad loss / expected.

        With sequence parallelism the gradients of a micro-batch's `peers`, added up, are `peers` times its own: each of
        them gives the whole loss, which it gathered from all (DeepSpeed's ALST tutorial).

        The result is one division of two exact numbers: with n equal micro-batches on each rank it is n to the last
        bit, and `loss / divisor` is DeepSpeed's own `loss / gradient_accumulation_steps`.

        Args:
            expected: expected total of the window (> 0).
            counts: what the micro-batch holds; its weight must be > 0 where the reduction is `mean`.
            averaged_over: what DeepSpeed divides the sum over ranks by (>= 1).
            peers: ranks that share a micro-batch, 1 without sequence parallelism.
        """
        weight = 1 if self.reduction == "sum" else self.of(counts)
        return expected * peers / (averaged_over * weight)

    @property
    def unit(self) -> str:
        """`rollout`, `token`, `pass`, `target` or `weight`, what the weights count; a divided loss is a pass."""
        return {DIVIDED: "pass", TERMS: "weight"}.get(self.name, self.name)

    @property
    def brought(self) -> int:
        """How many weights a micro-batch brings beside its counts."""
        return len(self.terms) if self.terms else int(self.name == "weight")

    @property
    def needs_totals(self) -> bool:
        """Whether the totals of a window must be known before its first backward: one factor can't correct them all."""
        return self.terms is not None and not self.terms.alike
