"""Several loss terms, each with a denominator of its own: what each weighs, and what it is divided by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ds_parity.errors import WindowError
from ds_parity.window.counts import Counts, weight_of


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the loss.

    Attributes:
        name: by which `backward({name: loss})` gives it.
        unit: `rollout`, `token`, `pass`, `target` or `weight`, what its mean runs over.
        coefficient: what its mean is multiplied by in the step's loss.
    """

    name: str
    unit: str
    coefficient: float = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of the loss, in the order of the configuration.

    The step's loss is the sum over terms of coefficient * sum(weight * loss) / sum(weight), where the sums run over the
    micro-batches of all ranks and passes that have the term.

    Attributes:
        all: the terms (one at least).
        target: the total of a term whose unit is `target`.
    """

    all: tuple[Term, ...]
    target: float = 0.0

    def __iter__(self) -> Iterator[Term]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(term.name for term in self.all)

    @property
    def alike(self) -> bool:
        """Whether all have one unit, so that one total corrects all of them."""
        return len({term.unit for term in self.all}) == 1 and self.all[0].unit not in ("target", "weight")

    def weighed(self, counts: Counts, given: Set[str], own: Mapping[str, object]) -> Counts:
        """Return the counts of one micro-batch with what each of its terms weighs; the arguments are those of `weigh`.

        Raises:
            WindowError: as `weigh` says.
        """
        weights = self.weigh(counts, given, own)
        lacks = frozenset(name for name in own if not weight_of(own[name]))
        return replace(counts, weights=weights, lacks=lacks)

    def weigh(
        self, counts: Counts, given: Set[str], own: Mapping[str, object], *, several: bool = False
    ) -> tuple[float, ...]:
        """Return what each term of a micro-batch weighs.

        Args:
            counts: what the micro-batch contains.
            given: names of the terms that it has; the others weigh 0.
            own: weights by name that its caller gives: of terms whose unit is `weight`, and 0 for others that it lacks.
            several: the counts are those of several micro-batches, of which some may lack a term.

        Raises:
            WindowError: a name is none of a term, a weight is none, contradicts the term's unit, or is missing where
                the unit is `weight`.
        """
        self.refuse_unknown([*given, *own])
        # What has a weight of its own is no idle pass, and so has the weight of a pass in terms by pass.
        names = [term.name for term in self.all if term.unit == "weight" and term.name in given and term.name in own]
        counts = replace(counts, weights=tuple(weight_of(own[name]) for name in names))
        return tuple(self._weight(term, counts, given, own, several) for term in self.all)

    def _weight(self, term: Term, counts: Counts, given: Set[str], own: Mapping[str, object], several: bool) -> float:
        if term.name not in given:
            return 0.0
        if term.name in own:
            weight = weight_of(own[term.name])
            if weight and not several and term.unit != "weight" and weight != counts.in_units(term.unit):
                raise WindowError(
                    f"weight of the term {term.name!r} is {weight:g}, and ds_parity.terms.{term.name}.weight is "
                    f"{term.unit!r}, by which this micro-batch weighs {counts.in_units(term.unit):g}: leave the weight "
                    "out, give 0 where the micro-batch lacks the term, or set the term's weight to 'weight'"
                )
            return weight
        if term.unit == "weight" and counts.active:
            raise WindowError(
                f"term {term.name!r} without a weight although ds_parity.terms.{term.name}.weight is 'weight': give "
                f"it, weight={{{term.name!r}: ...}}, any finite number >= 0"
            )
        return counts.in_units(term.unit)

    def refuse_unknown(self, names: Sequence[str]) -> None:
        """Raise WindowError where a name is none of a term."""
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise WindowError(
                f"{', '.join(map(repr, unknown))}: no term of ds_parity.terms, which are {', '.join(self.names)}; "
                "write the name as it stands there, or add the term to the configuration"
            )

    def shares(self, totals: Sequence[float]) -> dict[str, float]:
        """Return what each term's sum of weight * loss is multiplied by in the loss of a window of these totals.

        A term that weighs nothing has no share.
        """
        totals = totals or (0.0,) * len(self.all)
        return {
            term.name: term.coefficient / (self.target if term.unit == "target" else total)
            for term, total in zip(self.all, totals, strict=True)
            if total
        }

    def divisors(self, totals: Sequence[float]) -> tuple[float, ...]:
        """Return what each term is divided by, from the totals of their weights over a window.

        Raises:
            WindowError: no micro-batch of any rank has a term.
        """
        totals = totals or (0.0,) * len(self.all)
        self.refuse_terms_of_nobody(totals)
        return tuple(
            self.target if term.unit == "target" else total for term, total in zip(self.all, totals, strict=True)
        )

    def refuse_terms_of_nobody(self, totals: Sequence[float]) -> None:
        """Raise WindowError where a term weighs nothing over a whole window, unless its unit allows that."""
        for term, total in zip(self.all, totals, strict=True):
            if not total and term.unit != "weight":
                none = " (or none that has it has a token)" if term.unit == "token" else ""
                empty = "Leave rollouts without a token out of the stream. " if none else ""
                raise WindowError(
                    f"no micro-batch of any rank has the term {term.name!r} of ds_parity.terms in this window{none}, "
                    f"so that it has no mean. {empty}Where it is to have no part (a warm-up of the others), give it as "
                    f"0 times a loss; or set ds_parity.terms.{term.name}.weight to 'weight', by which it may weigh 0 "
                    f"in a window whose totals are known: engine.expect(..., weight={{{term.name!r}: 0}}), or passes() "
                    "with ds_parity.lookahead 'window' over micro-batches of that weight; or remove it from the "
                    "configuration"
                )
