"""By which factors faults change the gradients of every step.

Some faults say their factor before a step is looked at: it follows from the ranks, the passes or the total. Others have
a number of their own (a target, a weight of idle passes), which is read off the first step. Such a number predicts
something only where totals or idle passes differ between steps: otherwise any factor at all can be written so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_parity.parity.diagnosis.nearness import near
from ds_parity.parity.diagnosis.view import View

# A prediction that moves less than this from step to step is no more than one number.
_VARIES = 1.05
_BY_RANKS = 0.01
_WHOLE = 1e-3
# Rollouts of one micro-batch over those of an average one; counted idle passes are as long as micro-batches.
_LONGEST = 2.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a fault makes of the gradients.

    Attributes:
        factors: for each step from the first that differs on; None: not known.
        words: what the factors are, for a sentence.
        of_first_step: a number of it is read off the first step, which it therefore fits whatever the fault is.
        plausible: the fault may well have that number.
    """

    factors: Sequence[float | None]
    words: str
    of_first_step: bool = False
    plausible: bool = True

    @property
    def varies(self) -> bool:
        """Whether the factors of more than two steps are known, and more than one number."""
        known = [abs(it) for it in self.factors if it]
        return len(known) > 2 and max(known) > _VARIES * min(known)


def predictions(view: View, first: float) -> Mapping[str, Prediction]:
    """Return what each fault makes of the gradients, by its name.

    Args:
        view: two traces side by side.
        first: by what factor the gradient norm of the first step that differs is off.
    """
    at, totals = range(view.first, len(view.pairs)), view.totals
    found: dict[str, Prediction] = {}
    if view.first == 0:
        found |= _of_ranks(view, first) | _of_passes(view, first)
        found |= _of_idle_passes(view, first) | _of_a_target(view, first)
    else:
        # What is divided by one pass stays as it is, and so does what holds as much as the target says.
        found |= _of_passes(view, first) if set(view.passes[: view.first]) == {1} else {}
        found |= _of_idle_passes(view, first) if not any(view.idle[: view.first]) else {}
        found |= _of_a_target_met(view) if len(set(totals[: view.first])) == 1 else {}
    if totals[view.first] > 1:
        by_ranks = view.ranks > 1 and near(first, view.ranks / totals[view.first], _BY_RANKS)
        each, words = (view.ranks, "1 / the total for each rank,") if by_ranks else (1, "1 / total")
        found["divided-already"] = Prediction([_over(each, totals[i]) for i in at], words)
    if view.first and len(set(totals[: view.first])) == 1:
        shares = [_over(totals[i], totals[i - 1]) for i in at]
        found["wrong-window"] = Prediction(shares, "this window's total / the last one's")
    return found


def _of_ranks(view: View, first: float) -> dict[str, Prediction]:
    steps = len(view.pairs)
    found: dict[str, Prediction] = {}
    ranks = view.ranks
    if ranks > 1:
        found["dp-mean-left-in"] = Prediction([1 / ranks] * steps, f"1 / {ranks} (the number of ranks)")
    elif any(_whole(it) and round(it) > 1 for it in (first, 1 / first)):
        known = not any(one.header.ranks is None for one in (view.reference, view.candidate))
        # The same words for both, which the record can't tell apart.
        words = f"{first:.4g} ({'on one data-parallel rank' if known else 'the number of ranks is not recorded'})"
        # A mean over ranks is smaller than what it is of, and a sum larger.
        of_ranks = "sum-over-ranks" if first > 1 else "dp-mean-left-in"
        names = ["sp-factor-by-stage"] if known else [of_ranks, "sp-factor-by-stage"]
        found |= {name: Prediction([first] * steps, words, of_first_step=True) for name in names}
    return found


def _of_passes(view: View, first: float) -> dict[str, Prediction]:
    passes = view.passes[view.first :]
    if all(passes) and max(passes) > 1:
        return {"gas-scaled-twice": Prediction([1 / it for it in passes], "1 / passes of a rank")}
    if not any(view.passes) and first < 1 and _whole(1 / first):
        # A loop of other people's writes none down; what DeepSpeed divides by is in its configuration, and constant.
        words = f"{first:.4g} (gradient_accumulation_steps, or the passes of a rank, are not recorded)"
        return {"gas-scaled-twice": Prediction([first] * len(passes), words, of_first_step=True)}
    return {}


def _of_idle_passes(view: View, first: float) -> dict[str, Prediction]:
    totals, idle = view.totals[view.first :], view.idle[view.first :]
    weight = (1 / first - 1) * totals[0] / idle[0] if idle[0] else 0.0
    if not weight > 0:
        return {}
    micro_batches = max(1, view.passes[view.first] * view.ranks - idle[0])
    plausible = _whole(weight) and weight <= _LONGEST * totals[0] / micro_batches
    if sum(map(bool, idle)) == 1 and not plausible:
        return {}  # any factor of the one step that has idle passes has such a weight
    shares = [_over(total, total + weight * count) for total, count in zip(totals, idle, strict=True)]
    words = f"total / (total + {weight:.4g} for each idle pass)"
    return {"idle-counted": Prediction(shares, words, of_first_step=True, plausible=plausible)}


def _of_a_target(view: View, first: float) -> dict[str, Prediction]:
    totals, target = view.totals, view.totals[0] / first
    # A constant that every total is divided by must be near them: it is meant to be one of them.
    if not (min(totals) < 4 * target and target < 4 * max(totals)):
        return {}
    # A window ends with the pass that reaches its target. Half of it may be that pass where passes are not known.
    last_pass = totals[0] / max(2, view.passes[0])
    plausible = _whole(target) and 0 < totals[0] - target < last_pass
    shares = [_over(total, target) for total in totals]
    found = Prediction(shares, f"total / {target:.6g}", of_first_step=True, plausible=plausible)
    if not near(target, 1.0, _WHOLE):
        return {"target-not-actual": found}
    # Or a sum that nothing divides. The first pass that finishes a rollout ends a window of one.
    return {"another-divisor": found} | ({} if max(view.passes) > 1 else {"target-not-actual": found})


def _of_a_target_met(view: View) -> dict[str, Prediction]:
    target = view.totals[0]
    shares = [_over(total, target) for total in view.totals[view.first :]]
    return {"target-not-actual": Prediction(shares, f"total / {target:.6g} (which the steps before hold)")}


def _whole(value: float) -> bool:
    return math.isfinite(value) and near(value, round(value), _WHOLE)


def _over(one: float, other: float) -> float | None:
    return one / other if one and other else None
