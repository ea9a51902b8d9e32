"""What every window should contain, from full knowledge of all ranks' micro-batches: the definition, written plainly.

The references take their steps by this, and never by the window machine that they are there to check.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ds_parity.config import Settings
from ds_parity.parity.running.layouts import Passes
from ds_parity.planning.rollout import MicroBatch


@dataclass(frozen=True)
class PlannedWindow:
    """One window: passes `first` to `last`, both included.

    Attributes:
        expected: the total that losses are divided by as they go in.
        total: the total that the step is to be divided by.
        open: the data ended before the target was reached.
        progress: nominal progress after it.
    """

    first: int
    last: int
    expected: float
    total: float
    open: bool
    progress: Fraction


def weight(batch: MicroBatch, unit: str) -> int:
    """Return the units that a micro-batch's mean loss stands for."""
    return {"token": batch.tokens, "pass": int(not batch.idle)}.get(unit, batch.rollouts)


def windows_of(passes: Passes, settings: Settings, lookahead: bool = False) -> list[PlannedWindow]:
    """Cut the passes into windows.

    Args:
        passes: passes[pass][rank].
        settings: the extra keys.
        lookahead: a window that reaches its target divides losses by the actual total from its start.
    """
    windows: list[PlannedWindow] = []
    consumed = opened = first = applied = 0
    for index, row in enumerate(passes):
        consumed += sum(_units(batch, settings) for batch in row)
        limit = opened + settings.target
        if settings.overshoot == "carry":
            limit = (opened // settings.target + 1) * settings.target
        last_pass = index == len(passes) - 1
        if consumed < limit and not last_pass:
            continue
        window = passes[first : index + 1]
        total = _total(window, settings)
        known = (
            consumed >= limit and total and (lookahead or _first_with_a_gradient(window, settings) == len(window) - 1)
        )
        guess = total if known else _expected(window, settings, limit - opened)
        applied += consumed - opened if total else 0
        progress = Fraction(applied, settings.target)
        windows.append(PlannedWindow(first, index, guess, total, consumed < limit, progress))
        first, opened = index + 1, consumed
    return windows


def _units(batch: MicroBatch, settings: Settings) -> int:
    return batch.prompts if settings.count == "prompt" else batch.rollouts


def _weights(window: Passes, settings: Settings) -> list[int]:
    return [sum(weight(batch, settings.loss_weight) for batch in row) for row in window]


def _total(window: Passes, settings: Settings) -> float:
    weights = sum(_weights(window, settings))
    return float(settings.target if settings.loss_weight == "target" and weights else weights)


def _expected(window: Passes, settings: Settings, needed: int) -> float:
    if settings.loss_weight == "target":
        return float(settings.target)
    first = _first_with_a_gradient(window, settings)
    if first is None:
        return 0.0
    counted = sum(_units(batch, settings) for batch in window[first])
    return needed * max(1, _weights(window, settings)[first]) / max(counted, 1)


def _first_with_a_gradient(window: Passes, settings: Settings) -> int | None:
    weights = _weights(window, settings)
    return next((i for i, row in enumerate(window) if weights[i] or any(batch.tokens for batch in row)), None)
