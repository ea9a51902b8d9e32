"""How far the faults stand out: what they are off, beside what a clean engine is off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_parity.parity.verification.control_runs import ControlFinding


@dataclass(frozen=True, order=True)
class Signal:
    """What a fault shows by.

    Attributes:
        bounds: how many bounds it is off (> 1).
        quantity: in which it is so.
    """

    bounds: float
    quantity: str


def signal(finding: ControlFinding) -> Signal | None:
    """Return the strongest signal of the first step that differs.

    None where something differs there that must be equal bit for bit (rollouts, LR), or is NaN, which no noise could
    hide; and where nothing differs, so that there is no signal.
    """
    differences = finding.comparison.differences if finding.comparison else ()
    steps = [it.step for it in differences if it.step is not None]
    here = [it for it in differences if steps and it.step == min(steps)]
    if not all(it.bound and it.difference is not None and not math.isnan(it.difference) for it in here):
        return None
    return max((Signal(it.difference / it.bound, it.field) for it in here if it.difference and it.bound), default=None)


def noise(findings: Iterable[ControlFinding]) -> dict[str, float]:
    """Return by quantity the greatest part of a bound that a clean engine used, in [0, 1] where none was caught."""
    greatest: dict[str, float] = {}
    for it in (it for one in findings if one.clean and one.comparison for it in one.comparison.measured):
        greatest[it.field] = max(greatest.get(it.field, 0.0), it.difference / it.bound)
    return greatest


def margins(findings: Sequence[ControlFinding]) -> dict[str, float]:
    """Return by quantity how many times the greatest noise the weakest signal is; of quantities that have both."""
    noises = noise(findings)
    weakest: dict[str, float] = {}
    for one in filter(None, (signal(finding) for finding in findings if not finding.clean)):
        weakest[one.quantity] = min(one.bounds, weakest.get(one.quantity, one.bounds))
    return {name: bounds / noises[name] for name, bounds in weakest.items() if noises.get(name)}
