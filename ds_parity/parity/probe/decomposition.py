"""The probe's arithmetic: an update written as a sum of gradients, and a name for what its coefficients look like."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

# Gradients that are nearly a sum of others have no coefficients of their own.
_WORST_CONDITION = 1e3
_NOT_MEASURABLE = (
    "gradients are 0, or nearly sums of each other: their coefficients can't be told; probe other rollouts"
)

_HIDDEN = "rounding hides the coefficients, which can't be told: probe in fp32"

_NOT_FINITE = "a micro-batch's own gradient is not finite: nothing can be told; look at its loss"

_AS_EXPECTED = "as expected"

# Coefficients are sums of thousands of terms, which average rounding out: the measured error is 100 times smaller.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}

# The share of an update that may be unexplained, whatever it is.
_UNEXPLAINED = 0.05
# Beyond this share, what is explained is what two losses of one model have in common.
_ANOTHER_LOSS = 0.5
# The share that rounding leaves unexplained; measured: 5e-6 in fp32, 7e-4 in fp16, 7e-3 in bf16.
_ROUNDED = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
# Rounding leaves the gradients' span and stays in it. What leaves it is the residual, from which a coefficient's
# standard error follows; errors of up to 24 of these were measured (bf16, fp16 and fp32, 1 to 4 terms, condition 2 to
# 20), because the rounding of a gradient is not independent of the gradient.
_STANDARD_ERRORS = 40
# Where that is more than a quarter of a coefficient, it could not be told from half or twice as much.
_TOO_ROUGH = 0.25

# Unit vectors that lie no further apart are one direction: rounding separates those of equal micro-batches by 1e-7 in
# fp32.
_ONE_DIRECTION = 1e-6


@dataclass(frozen=True)
class ProbeResult:
    """What one window came to.

    Attributes:
        measured: coefficients with which micro-batches entered the step, by pass and rank. Where the loss has several
            terms, each rank has as many columns as there are terms: with which each term of its micro-batch did.
        expected: weight / total of each micro-batch, alike.
        residual: share of the update that no combination of the gradients explains (0 to 1).
        condition: condition number of the normalised gradients.
        error: greatest |measured - expected|, in units of the greatest expected coefficient.
        pattern: what the coefficients look like, in words.
        alike: micro-batches whose gradient has the direction of another's (two equal solutions of a prompt). Only the
            sum of such coefficients can be measured; a difference is shared among them.
        terms: names of the terms of the loss; empty where it has one.
        beyond: greatest |measured - expected| that rounding does not explain, in the same units.
        hidden: rounding may have moved a coefficient by more than a quarter of what it should be.
        untested: each (pass, rank) from which nothing could be missing: it weighs nothing, or its gradient is 0.
    """

    measured: list[list[float]]
    expected: list[list[float]]
    residual: float
    condition: float
    error: float
    pattern: str
    alike: int
    beyond: float
    hidden: bool
    terms: tuple[str, ...] = ()
    untested: list[tuple[int, int]] = field(default_factory=list)

    def of_term(self, term: str) -> tuple[list[list[float]], list[list[float]]]:
        """Return what is measured of one term of the loss, and what is expected: each by pass and rank."""
        at, step = self.terms.index(term), len(self.terms)
        return [row[at::step] for row in self.measured], [row[at::step] for row in self.expected]

    def said(self, tolerance: float) -> str:
        """The pattern and the errors, in a line."""
        errors = f"greatest error {self.error:.2g}, beyond rounding {self.beyond:.2g} of {tolerance:g} allowed"
        if self.pattern == _AS_EXPECTED and self.residual > _UNEXPLAINED:
            return f"{_unexplained(self.residual)}: something else entered it, such as an idle pass ({errors})"
        if self.pattern == _AS_EXPECTED and self.beyond > tolerance:
            return f"shares that lie near the weights, and not as near as rounding leaves them ({errors})"
        return f"{self.pattern} ({errors})"

    def within(self, tolerance: float) -> bool:
        """Whether every coefficient is as expected, and the gradients explain the update."""
        told = self.condition <= _WORST_CONDITION and not self.hidden
        return told and self.beyond <= tolerance and self.residual <= max(_UNEXPLAINED, tolerance)


def decompose(
    update: np.ndarray,
    gradients: np.ndarray,
    expected: list[list[float]],
    terms: tuple[str, ...] = (),
    dtype: str = "fp32",
) -> ProbeResult:
    """Write `update` as a sum of the rows of `gradients`.

    Args:
        update: (P,) the step taken, as a gradient: (before - after) / lr.
        gradients: (passes * ranks * terms, P), zero rows for idle passes.
        expected: weight / total of each micro-batch, by pass and rank; each term of a rank has a column.
        terms: names of the terms of the loss, where it has several.
        dtype: that the engine computes in, fp32, bf16 or fp16.
    """
    norms = np.linalg.norm(gradients, axis=1)
    wanted = np.array(expected).reshape(-1)
    live = norms > 0
    if not np.isfinite(norms).all() or not live.any():
        nothing = np.zeros_like(np.array(expected)).tolist()
        pattern = _NOT_MEASURABLE if np.isfinite(norms).all() else _NOT_FINITE
        untested = _untested(np.zeros(len(norms), dtype=bool), expected, len(terms) or 1)
        told_nothing = ProbeResult(nothing, expected, 1.0, np.inf, 1.0, pattern, 0, 1.0, hidden=False)
        return replace(told_nothing, terms=terms, untested=untested)
    units = gradients[live] / norms[live, None]
    owners, signs = _directions(units)
    first = np.unique(owners, return_index=True)[1]
    basis = units[first].T
    solution, *_ = np.linalg.lstsq(basis, update, rcond=None)
    # What a direction holds beyond what it should is shared among its micro-batches: the least change that explains it.
    lengths = norms[live] * signs
    surplus = solution - np.bincount(owners, wanted[live] * lengths)
    coefficients = np.zeros(len(norms))
    coefficients[live] = wanted[live] + (surplus / np.bincount(owners, lengths**2))[owners] * lengths
    size = float(np.linalg.norm(update)) or 1.0
    measured = coefficients.reshape(-1, len(expected[0]))
    condition = _condition(basis, bool((~live & (wanted > 0)).any()))
    residual = float(np.linalg.norm(update - basis @ solution)) / size
    off = np.abs(coefficients - wanted)
    moved = np.zeros(len(norms))
    # More than that is no rounding: something entered the step that is no micro-batch's gradient.
    if residual <= _ROUNDED[dtype]:
        moved[live] = _scatter(update - basis @ solution, basis)[owners] / norms[live]
    hidden = bool((moved > _TOO_ROUGH * wanted)[live & (wanted > 0)].any())
    told = condition <= _WORST_CONDITION and not hidden
    pattern = _NOT_MEASURABLE if condition > _WORST_CONDITION else _HIDDEN
    return ProbeResult(
        measured=measured.tolist(),
        expected=expected,
        residual=residual,
        condition=condition,
        error=float(off.max() / wanted.max()),
        pattern=_pattern(measured, np.array(expected), _other_loss(residual)) if told else pattern,
        alike=len(owners) - len(first),
        terms=terms,
        beyond=float(max((off - moved).max(), 0.0) / wanted.max()),
        hidden=hidden,
        untested=_untested(live & (wanted > 0), expected, len(terms) or 1),
    )


def _untested(seen: np.ndarray, expected: list[list[float]], terms: int) -> list[tuple[int, int]]:
    """Return each (pass, rank) of which no column is among those that could be missing."""
    cells = seen.reshape(len(expected), -1, terms).any(axis=2)
    return [(int(index), int(rank)) for index, rank in np.argwhere(~cells)]


def _other_loss(residual: float) -> str:
    """Name an update of which gradients explain so little that their coefficients say nothing; "" where they do."""
    if not residual > _UNEXPLAINED:  # also where it is NaN, which has a name of its own
        return ""
    if residual > _ANOTHER_LOSS:
        return f"{_unexplained(residual)}: it is the step of another loss, or of another model or other data"
    return f"{_unexplained(residual)}: something else entered the step, or changed it"


def _unexplained(residual: float) -> str:
    return f"{residual:.0%} of the update is no sum of the micro-batches' gradients"


def _directions(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each unit vector the number of its direction, from 0, and 1 along it or -1 against it."""
    cosines = units @ units.T
    one = 2 - 2 * np.abs(cosines) <= _ONE_DIRECTION**2
    first = one.argmax(axis=1)
    return np.unique(first, return_inverse=True)[1], np.sign(cosines[np.arange(len(units)), first])


def _scatter(unexplained: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Return how far rounding may have moved the length of each direction, (directions,).

    The standard error of least squares (Draper and Smith, Applied Regression Analysis, section 1.4), as many times as
    was measured.

    Args:
        unexplained: (P,) what is left of the update.
        basis: (P, directions) unit vectors.
    """
    free = basis.shape[0] - basis.shape[1]
    if free <= 0:
        return np.zeros(basis.shape[1])  # nothing is unexplained, and the condition says that nothing can be told
    variance = float(unexplained @ unexplained) / free
    errors: np.ndarray = np.sqrt(variance * np.abs(np.diag(np.linalg.pinv(basis.T @ basis))))
    return _STANDARD_ERRORS * errors


def _condition(basis: np.ndarray, unexplained: bool) -> float:
    # More directions than parameters, or none where a weight is due, have no coefficients of their own.
    if basis.shape[1] > basis.shape[0] or unexplained:
        return float("inf")
    return float(np.linalg.cond(basis))


def _pattern(  # noqa: PLR0911  # one return a pattern
    measured: np.ndarray, expected: np.ndarray, other_loss: str = ""
) -> str:
    """Name what the coefficients look like, from the plainest to the strangest; idle passes have no say."""
    near = 0.05 * expected.max()
    if not np.isfinite(measured).all():
        return "the update is not finite"
    if np.abs(measured - expected).max() <= near:
        return _AS_EXPECTED
    if other_loss:
        return other_loss
    if np.abs(measured).max() <= near:
        return "nothing entered the step"
    due = expected > 0
    ratios = measured[due] / expected[due]
    if np.abs(ratios - ratios.mean()).max() <= 0.05 * np.abs(ratios).max():
        return f"all off by the same factor, {ratios.mean():.4g}"
    passes = [np.abs(row[owed]).max() > near for row, owed in zip(measured, due, strict=True) if owed.any()]
    if len(passes) > 1 and passes == [False] * (len(passes) - 1) + [True]:
        return "only the last pass entered the step: the earlier ones were overwritten (last-backward-only)"
    if len(passes) > 1 and passes == [False] + [True] * (len(passes) - 1):
        return "the first pass is missing"
    return "micro-batches entered with other shares than their weights"
