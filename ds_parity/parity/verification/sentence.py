"""What a verification comes to in one sentence; where a training function ran on both sides, what that judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_parity.config import Settings
from ds_parity.parity.comparison.fields import Comparison
from ds_parity.parity.subjects.oracle import windows_of

if TYPE_CHECKING:
    from ds_parity.parity.verification.verify import Outcome


def found(outcomes: Sequence[Outcome], equal: bool, bare: bool) -> str:
    """Say what was found.

    Args:
        outcomes: the comparisons.
        equal: all of them are.
        bare: bare DeepSpeed was judged, and not ds_parity.
    """
    trains = {outcome.reference: outcome for outcome in outcomes if outcome.scenario.train}
    if not trains:
        return "every step is equal" if equal else "the runs differ"
    whole = trains.get("torch")
    function, settings = next((one.scenario.train or "", one.scenario.settings) for one in trains.values())
    if equal and whole is not None:
        return (
            f"every step is equal; {function} takes the same steps on whole windows in plain torch, so its loss is "
            "divided as the configuration says (a constant factor of it is on both sides, and was not judged)"
        )
    if equal:
        said = f"every step is equal; both sides ran {function}, so only the engine was judged, and not its loss"
        return said + _left_out(next(iter(trains.values())))
    if whole is None or whole.comparison.equal:
        return "the runs differ"
    loop = trains.get("deepspeed-loop")
    return _apart(whole.comparison, None if loop is None else loop.comparison.equal, function, settings, bare)


def _left_out(outcome: Outcome) -> str:
    """Say that both sides ran fewer windows than there are; "" where they ran all, or end windows themselves."""
    scenario, steps = outcome.scenario, len(outcome.candidate.steps)
    if scenario.settings.by_caller:
        return ""
    there = len(windows_of(scenario.batches(), scenario.settings))
    if steps >= there:
        return ""
    return (
        f". It took {steps} step{'s' * (steps != 1)}, and its micro-batches are those of {there} windows: what it left "
        "out was not judged"
    )


def _apart(whole: Comparison, by_hand: bool | None, function: str, settings: Settings, bare: bool) -> str:
    """Say what is known where the steps on whole windows differ; `by_hand`: those of deepspeed-loop are equal."""
    elsewhere = _beside_the_loss(whole, function)
    if bare:
        return f"the runs differ: this DeepSpeed, or {'the loss of ' * (not elsewhere)}{function}, is wrong"
    if elsewhere:
        engine = {
            True: "the engine steps right, and",
            False: "the runs differ, also from deepspeed-loop:",
            None: "the runs differ:",
        }[by_hand]
        return f"{engine} {elsewhere}"
    engine = {
        True: "the engine steps right, and",
        False: "the runs differ, also from deepspeed-loop; perhaps",
        None: "the runs differ; if deepspeed-loop, with the same function, does not,",
    }[by_hand]
    return f"{engine} the loss of {function} is not {_configured_loss(settings)}"


def _beside_the_loss(whole: Comparison, function: str) -> str:
    """Say what differs first where that is not the loss of the first step; "" where it is.

    A loss that is not what the configuration says is another number on the first whole window, unless its rows are all
    as long, or the term that is wrong is 0 there.
    """
    steps = [one.step for one in whole.differences if one.step is not None]
    if not steps:
        return ""  # it is off to one side over all steps
    at, begin = min(steps), whole.rows[0].step
    fields = [one.field for one in whole.differences if one.step == at]
    if "step" in fields:
        return f"{function} takes other steps on whole windows in plain torch, from step {at} on"
    if at > begin and "loss" in fields:
        return (
            f"{function} takes the same steps on whole windows in plain torch before step {at}, and has another loss "
            "from there on: it is another function that agrees on the windows before (whose rows are all as long, or "
            "where a term is 0), or the function changes something beside its loss (weights, rates, a state of its own)"
        )
    if at > begin:
        return (
            f"{function} takes the same steps on whole windows in plain torch before step {at}, with the same loss; "
            f"what it does differently from there on is not known: look at what it changes beside its loss (weights, "
            "gradients, rates, a state of its own)"
        )
    if "loss" in fields:
        return ""
    named = " or ".join(one.replace("grad_norm", "gradient norm") for one in fields)
    return (
        f"{function} has the same loss in step {at} on whole windows in plain torch, and not the same {named}: either "
        "it changes them itself, by clipping for one, or its loss has another gradient there"
    )


def _configured_loss(settings: Settings) -> str:
    """Say what the loss of a micro-batch should be."""
    if settings.terms is not None:
        return "what ds_parity.terms says: one of its terms is another number on a whole window"
    unit = "loss tokens" if settings.loss_weight == "token" else "rollouts"
    kind = "the sum" if settings.loss_reduction == "sum" else "the mean"
    return f"{kind} over the {unit} of a micro-batch, as the configuration says"
