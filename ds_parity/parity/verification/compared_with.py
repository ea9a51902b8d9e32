"""Which runs `verify` compares a configuration with, which it leaves out, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_parity.config.autotp import data_parallel_ranks
from ds_parity.errors import ConfigError
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.running.layouts import cut_by
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.side_effects import without_outputs

TIERS = {"deepspeed": Tier.EXACT, "deepspeed-loop": Tier.EXACT, "torch": Tier.REASSOCIATED}

# Losses for which bare DeepSpeed's mean over passes is another step.
_NOT_ALIKE = {
    "weight": "its mean over passes gives every micro-batch one weight, and here each brings its own",
    "divided": "it divides every loss by its number of passes, and here the caller has divided already",
    "terms": "its mean over passes is one denominator for all terms, and here each has its own",
}


# Losses of a training function that are another number on a whole window than its micro-batches' are together.
_NOT_WHOLE = {
    "pass": "there a micro-batch counts as one, whatever it contains, and a whole window is another loss",
    "weight": "there each micro-batch brings a weight of its own, and a whole window has none",
    "divided": "there the function itself divides by a total, which a whole window has another one of",
}


# What runs a scenario where bare DeepSpeed itself is judged: the loop by hand, and its own fixed accumulation.
BARE = {"ragged": "bare", "uniform": "deepspeed"}


@dataclass(frozen=True)
class LeftOut:
    """A comparison that can't be made, and why."""

    scenario: str
    reference: str
    why: str

    def __str__(self) -> str:
        return f"{self.scenario} against {self.reference}: {self.why}"


def scenarios(
    config: dict[str, Any], ranks: int, against: Sequence[str] = (), **options: Any
) -> tuple[list[tuple[Scenario, tuple[str, ...]]], list[LeftOut]]:
    """Return what `verify` runs for a configuration, with its references, and what it leaves out and why.

    Args:
        config: extended configuration.
        ranks: processes to start.
        against: names of references; empty: all that there are, and `deepspeed-loop` alone with a training function.
        options: of `Scenario`.

    Raises:
        ConfigError: the configuration can't be run at all, misspells a key of DeepSpeed's, or can't be run
            against any of the references that are asked for.
    """
    for name in against:
        if name not in TIERS:
            raise ConfigError(f"--against is {name!r}: it must be one of {', '.join(TIERS)}")
    wanted, left_out = _possible(without_outputs(config), ranks, "torch" in against, **options)
    if against:
        kept = [(scenario, tuple(one for one in named if one in against)) for scenario, named in wanted]
        wanted = [(scenario, named) for scenario, named in kept if named]
        left_out = [one for one in left_out if one.reference in against]
        if not wanted:
            raise ConfigError(f"nothing is left to compare: {'; '.join(map(str, left_out))}")
    return wanted, left_out


def of_bare(
    config: dict[str, Any], ranks: int, **options: Any
) -> tuple[list[tuple[Scenario, tuple[str, ...]]], list[LeftOut]]:
    """Return the same where bare DeepSpeed is judged: every scenario against plain torch alone.

    Args:
        config: extended configuration.
        ranks: processes to start.
        options: of `Scenario`.

    Raises:
        ConfigError: the configuration can't be run, or plain torch can't run its training function.
    """
    wanted, left_out = _possible(without_outputs(config), ranks, True, **options)
    judged: list[tuple[Scenario, tuple[str, ...]]] = []
    judged += [(scenario, ("torch",)) for scenario, named in wanted if "torch" in named or scenario.name == "uniform"]
    if not judged:
        raise ConfigError(f"nothing is left to compare bare DeepSpeed with: {'; '.join(map(str, left_out))}")
    return judged, [one for one in left_out if one.reference == "torch"]


def _possible(
    config: dict[str, Any], ranks: int, judges_loss: bool, **options: Any
) -> tuple[list[tuple[Scenario, tuple[str, ...]]], list[LeftOut]]:
    if options.get("windows", 1) < 1:
        raise ConfigError(f"windows = {options['windows']}: must be at least 1")
    ranks = data_parallel_ranks(config, ranks)
    ragged = Scenario("ragged", config, ranks, shape="overshoot", **options)
    # Where going beyond the target is an error, windows contain it exactly.
    shape = "ragged" if ragged.settings.overshoot == "error" else ragged.shape
    # A scenario has whole windows alone where the last one is not to be stepped as it is.
    short = min(2, cut_by(ragged.settings).target - 1) if ragged.settings.last_window == "step" else 0
    ragged = replace(ragged, shape=shape, short=short)
    ragged.layout()  # for its ConfigError, before any rank is started
    if ragged.train:
        return _of_training_function(ragged, judges_loss)
    wanted: list[tuple[Scenario, tuple[str, ...]]] = [(ragged, ("deepspeed-loop", "torch"))]
    weighed_by = "terms" if ragged.settings.terms else ragged.settings.loss_weight
    if weighed_by in _NOT_ALIKE:
        return wanted, [LeftOut("uniform", "deepspeed", _NOT_ALIKE[weighed_by])]
    if ragged.settings.count == "prompt":
        return wanted, [LeftOut("uniform", "deepspeed", "it steps by micro-batches, and here windows end by prompts")]
    uniform = Scenario("uniform", config, ranks, shape="uniform", **options)
    try:
        uniform.layout()
    except ConfigError as error:
        return wanted, [LeftOut("uniform", "deepspeed", str(error))]
    return [(uniform, ("deepspeed",)), *wanted], []


def _of_training_function(
    ragged: Scenario, judges_loss: bool
) -> tuple[list[tuple[Scenario, tuple[str, ...]]], list[LeftOut]]:
    without_calls = LeftOut(
        "ragged", "deepspeed", "a training function calls an engine, and this reference has a loop of its own"
    )
    units: set[str] = {term.weight for term in (ragged.settings.terms or {}).values()}
    units = units or {ragged.settings.loss_weight}
    reasons = [f"ds_parity has the loss weight {unit!r}: {_NOT_WHOLE[unit]}" for unit in units if unit in _NOT_WHOLE]
    if reasons:
        return [(ragged, ("deepspeed-loop",))], [LeftOut("ragged", "torch", reasons[0]), without_calls]
    if not judges_loss:
        not_asked = "it judges the function's loss on whole windows, where it is asked for: --against torch"
        return [(ragged, ("deepspeed-loop",))], [LeftOut("ragged", "torch", not_asked), without_calls]
    return [(ragged, ("deepspeed-loop", "torch"))], [without_calls]
