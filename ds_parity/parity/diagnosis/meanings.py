"""What follows from the hypotheses that a reference computes, by their names without what stands after a colon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """What follows from a hypothesis.

    Attributes:
        words: whose figures these are.
        always: causes where the steps after the first that differs are so too.
        later: causes where the first steps are right, and all from then on are so.
        once: causes where it is one step alone.
        of_shares: it may hold for one term of the loss and not for the others.
    """

    words: str
    always: tuple[str, ...]
    later: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    of_shares: bool = False


_LAST = ("last-backward-only", "last-backward-by-caller")
_LOST = ("mid-window-checkpoint",)
_EVEN = ("mean-of-micro-batches",)
_UNIT = ("weighed-by-another-unit",)
_SCALE = ("clip-at-wrong-scale",)
_METADATA = ("global-metadata",)

MEANINGS: Mapping[str, Meaning] = {
    "mean-of-micro-batches": Meaning("micro-batches whose means all weigh the same", _EVEN, of_shares=True),
    "mean-with-idle-ones": Meaning(
        "micro-batches whose means all weigh the same, idle ones among them", _EVEN, of_shares=True
    ),
    "mean-on-each-rank": Meaning(
        "micro-batches whose means weigh the same on each rank, and ranks that do", _EVEN, of_shares=True
    ),
    "mean-of-passes": Meaning("passes whose means all weigh the same", _EVEN, of_shares=True),
    "mean-of-ranks": Meaning("ranks whose own means all weigh the same", ("half-broadcast",), of_shares=True),
    "running-total": Meaning("passes that are divided by the total so far", ("running-total",), of_shares=True),
    "weighed-by-rollout": Meaning("micro-batches that weigh by their rollouts", _UNIT, of_shares=True),
    "weighed-by-token": Meaning("micro-batches that weigh by their tokens", _UNIT, of_shares=True),
    "passes-lost": Meaning("a window without its first passes", ("first-passes-lost",), (), _LOST),
    "first-pass-lost": Meaning(
        "a window without its first pass", ("first-passes-lost",), ("sticky-boundary",), _LOST
    ),
    "last-pass-alone": Meaning("the window's last pass alone", _LAST, ("sticky-boundary", *_LAST), _LOST),
    "last-pass-lost": Meaning("a window without its last pass", ("last-pass-lost",)),
    "rank-alone": Meaning("one rank's own gradient, not reduced with the others'", ("late-boundary",)),
    "not-reduced": Meaning(
        "one rank's own gradient, not reduced with the others', and the mean of their norms", ("late-boundary",)
    ),
    "rank-left-out": Meaning("a window without one rank's gradients", ("rank-left-out",)),
    "gradient-kept": Meaning("a gradient that the last window's is added to", ("gradient-not-zeroed",)),
    "other-mean": Meaning("micro-batches averaged over other units than weigh them", ("mixed-weights",)),
    "unmasked-numerator": Meaning("a loss of all tokens, divided by those of the mask", ("unmasked-numerator",)),
    "unmasked-numerator-and-padding": Meaning(
        "a loss of all tokens and padding, divided by those of the mask", ("unmasked-numerator",)
    ),
    "unmasked": Meaning("a loss of all tokens, prompts with them", ("mask-left-out",)),
    "lost-after-idle": Meaning("micro-batches behind an idle pass that count nothing", ("shared-padding",)),
    "no-advantages": Meaning("a loss without advantages", ("advantages-left-out",)),
    "advantages-of-run": Meaning("rows with the first advantages of the run", _METADATA),
    "clipped-over-ranks": Meaning("a gradient clipped at the limit over the number of ranks", _SCALE),
    "clipped-times-ranks": Meaning("a gradient clipped at the limit times the number of ranks", _SCALE),
    "clipped-at-default": Meaning("a gradient clipped at 1, DeepSpeed's default", ("implicit-clip",)),
    "not-clipped": Meaning("a gradient that is not clipped", ("clipping-left-out",)),
    "optimizer-afresh": Meaning("an optimizer that begins without a state", ("resume-loses-optimizer",)),
    "step-count-afresh": Meaning("an optimizer whose count of steps begins anew", ("adam-step-count",)),
    "no-weight-decay": Meaning("an optimizer without weight decay", ("weight-decay",)),
    "advantages-of-window": Meaning("rows with the first advantages of the window", _METADATA),
}  # fmt: skip

COMPUTED = frozenset(name for it in MEANINGS.values() for names in (it.always, it.later, it.once) for name in names)
"""Causes that a reference with hypotheses has computed: they are excluded where none of them fits."""
