"""What every window should contain, from full knowledge of all ranks' micro-batches: the definition, written plainly.

The references take their steps by this, and never by the window machine that they are there to check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ds_parity.config import Settings
from ds_parity.parity.running.layouts import Passes, closes_at, cut_by, of_one_unit
from ds_parity.planning.rollout import MicroBatch


@dataclass(frozen=True)
class PlannedWindow:
    """One window: passes `first` to `last`, both included.

    Attributes:
        expected: the total that losses are divided by as they go in.
        total: the total that the step is to be divided by.
        open: the data ended before the target was reached.
        progress: nominal progress after it.
        divided_by: what the caller divides the window's losses by before they go in, where he has to
            (`loss_weight: divided`): a micro-batch's mean over tokens is multiplied by its tokens and divided by this.
        totals: what the mean of each term of the loss is divided by, by its name; empty where the loss has no terms.
    """

    first: int
    last: int
    expected: float
    total: float
    open: bool
    progress: Fraction
    divided_by: float | None = None
    totals: Mapping[str, float] = field(default_factory=dict)


def weight(batch: MicroBatch, unit: str) -> float:
    """Return the units that a micro-batch's mean loss stands for; a loss that its caller has divided is a pass."""
    whole = int(not batch.idle)
    own = batch.weight if isinstance(batch.weight, int | float) else 0
    return {"token": batch.tokens, "pass": whole, "divided": whole, "weight": own}.get(unit, batch.rollouts)


def weights_of_terms(batch: MicroBatch, settings: Settings) -> dict[str, float]:
    """Return what a micro-batch weighs in the mean of each term of the loss, by its name."""
    own = batch.weight if isinstance(batch.weight, Mapping) else {}
    return {
        name: own.get(name, 0) if term.weight == "weight" else weight(batch, term.weight)
        for name, term in (settings.terms or {}).items()
    }


def weighs(batch: MicroBatch, settings: Settings) -> float:
    """Return what a micro-batch weighs in its step; with several terms, what all of them weigh together."""
    if settings.terms is not None:
        return sum(weights_of_terms(batch, settings).values())
    return weight(batch, settings.loss_weight)


def given_share(batch: MicroBatch, window: PlannedWindow) -> float:
    """Return what the caller multiplies a micro-batch's mean loss by, before it goes in: 1 but for divided losses."""
    return 1.0 if window.divided_by is None else batch.tokens / window.divided_by


def coefficients(batch: MicroBatch, window: PlannedWindow, settings: Settings) -> tuple[float, ...]:
    """Return the coefficient with which a micro-batch's mean loss is to enter its step, or each term of it.

    A term's is that of its loss times the coefficient which the configuration gives it: 0 where that is 0.
    """
    if settings.terms is None:
        return (weight(batch, settings.loss_weight) * given_share(batch, window) / window.total,)
    return tuple(
        units / window.totals[name] if settings.terms[name].coefficient and window.totals[name] else 0.0
        for name, units in weights_of_terms(batch, settings).items()
    )


def windows_of(passes: Passes, settings: Settings, lookahead: bool = False) -> list[PlannedWindow]:
    """Cut the passes into windows.

    Args:
        passes: passes[pass][rank].
        settings: the extra keys.
        lookahead: a window that reaches its target divides losses by the actual total from its start. Of no effect
            where the caller ends windows.

    Where the caller ends windows, the scenario's loop does so at the nominal target.
    """
    nominal, settings = settings.gradient_accumulation_passes is not None, cut_by(settings)
    windows: list[PlannedWindow] = []
    consumed = opened = first = applied = 0
    for index, row in enumerate(passes):
        consumed += sum(_units(batch, settings) for batch in row)
        limit = closes_at(opened, settings)
        last_pass = index == len(passes) - 1
        if consumed < limit and not last_pass:
            continue
        window = passes[first : index + 1]
        total = _total(window, settings)
        known = (
            consumed >= limit and total and (lookahead or _first_with_a_gradient(window, settings) == len(window) - 1)
        )
        guess = total if known else _expected(window, settings, limit - opened)
        if settings.by_caller:
            guess = _expected_by_caller(window, settings, nominal, windows)
        applied += consumed - opened if total else 0
        progress = Fraction(applied, settings.target)
        divided_by, totals = _divided_by(window, settings), _totals_of_terms(window, settings)
        windows.append(PlannedWindow(first, index, guess, total, consumed < limit, progress, divided_by, totals))
        first, opened = index + 1, consumed
    return windows


def _units(batch: MicroBatch, settings: Settings) -> int:
    return batch.prompts if settings.count == "prompt" else batch.rollouts


def _weights(window: Passes, settings: Settings) -> list[float]:
    return [sum(weighs(batch, settings) for batch in row) for row in window]


def _totals_of_terms(window: Passes, settings: Settings) -> dict[str, float]:
    given = [weights_of_terms(batch, settings) for row in window for batch in row]
    return {
        name: float(settings.target if term.weight == "target" else sum(one[name] for one in given))
        for name, term in (settings.terms or {}).items()
    }


def _total(window: Passes, settings: Settings) -> float:
    weights = sum(_weights(window, settings))
    constant = _constant(settings, len(window[0]))
    return float(weights if constant is None or not weights else constant)


def _constant(settings: Settings, ranks: int) -> float | None:
    """Return the total of every window that has a weight, where it does not follow from what it contains."""
    if settings.loss_weight == "divided":
        return 1.0 if settings.across_ranks == "sum" else float(ranks)
    if settings.terms is not None:
        # Terms of several units are divided as they go in, each by its own total, and the step by nothing more.
        return None if of_one_unit(settings) else 1.0
    return float(settings.target) if settings.loss_weight == "target" else None


def _divided_by(window: Passes, settings: Settings) -> float | None:
    """Return the caller's own denominator: the window's tokens, of each rank in the mean where ranks are averaged."""
    if settings.loss_weight != "divided":
        return None
    tokens = sum(batch.tokens for row in window for batch in row)
    return tokens / (1 if settings.across_ranks == "sum" else len(window[0]))


def _expected_by_caller(window: Passes, settings: Settings, nominal: bool, before: Sequence[PlannedWindow]) -> float:
    """Return what a window's losses are divided by where it is the caller who ends it.

    The last total that was not 0; in the first window what the first micro-batches of all ranks weigh, as many times as
    their rollouts (or prompts) fit into a target that the configuration gives; and where all of these weigh 0, a usual
    micro-batch on each rank.
    """
    ranks = len(window[0])
    constant = _constant(settings, ranks)
    if constant is not None:
        return constant
    usual = float(ranks * int(settings.train_micro_batch_size_per_gpu))
    totals = [one.total for one in before if one.total]
    if before:
        return totals[-1] if totals else usual
    counted = sum(_units(batch, settings) for batch in window[0])
    times = settings.target / counted if nominal and counted else 1.0
    return _weights(window, settings)[0] * times or usual


def _expected(window: Passes, settings: Settings, needed: int) -> float:
    constant = _constant(settings, len(window[0]))
    if constant is not None:
        return constant
    first = _first_with_a_gradient(window, settings)
    if first is None:
        return 0.0
    counted = sum(_units(batch, settings) for batch in window[first])
    return needed * (_weights(window, settings)[first] or 1) / max(counted, 1)


def _first_with_a_gradient(window: Passes, settings: Settings) -> int | None:
    weights = _weights(window, settings)
    return next((i for i, row in enumerate(window) if weights[i] or any(batch.tokens for batch in row)), None)
