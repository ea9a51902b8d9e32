"""The probe, the X-ray of one step: with what coefficient did each micro-batch really enter it?

Every micro-batch's own gradient is computed apart in plain torch. One window is run through the engine with SGD; its
update is then written as a sum of those gradients (least squares), and the coefficients are compared with
w[r,i] / total. It works on any engine and loop, and needs no tolerance to speak of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_parity.parity import weights
from ds_parity.parity.candidate import own_batches
from ds_parity.parity.oracle import plan, weight
from ds_parity.parity.scenario import Scenario, resolve

# Gradients that are nearly a sum of others have no coefficients of their own.
_WORST_CONDITION = 1e3

# Coefficients are sums of thousands of terms, which average rounding out: the measured error is 100 times smaller.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}

# A step long enough that the update, not the weights, fills the digits of a bf16 weight.
_RATE = {"fp32": 1.0, "bf16": 1024.0, "fp16": 1024.0}


@dataclass(frozen=True)
class ProbeResult:
    """What one window came to.

    Attributes:
        measured: [pass][rank] coefficients with which micro-batches entered the step.
        expected: [pass][rank] of w / total.
        residual: share of the update that no combination of the gradients explains (0 to 1).
        condition: condition number of the normalised gradients.
        error: greatest |measured - expected|, in units of the greatest expected coefficient.
        pattern: what the coefficients look like, in words.
    """

    measured: list[list[float]]
    expected: list[list[float]]
    residual: float
    condition: float
    error: float
    pattern: str

    def within(self, tolerance: float) -> bool:
        """Whether every coefficient is as expected, and the gradients explain the update."""
        return self.condition <= _WORST_CONDITION and self.error <= tolerance and self.residual <= max(0.05, tolerance)


def probe(scenario: dict[str, Any], subject: str) -> dict[str, Any]:
    """Run one window of a scenario and decompose its update; called on every rank.

    Args:
        scenario: its first window is probed; its optimizer is replaced by SGD, clipping and scheduler are left out.
        subject: `package.module:function(scenario, record)` that runs it, as the engines of a comparison do.

    Returns:
        A `ProbeResult` as plain values, the same on every rank.
    """
    wanted = prepared(Scenario.from_json(scenario))
    passes = wanted.batches()
    window = plan(passes, wanted.settings)[0]
    start, gradients = _gradients(wanted, window.last + 1)
    update = _update(wanted, start, resolve(subject))
    expected = [
        [weight(b, wanted.settings.loss_weight) / window.total for b in row] for row in passes[: window.last + 1]
    ]
    return asdict(decompose(update, gradients, expected))


def prepared(scenario: Scenario) -> Scenario:
    """Return the scenario with plain SGD and nothing else that shapes the update."""
    config = copy.deepcopy(scenario.config)
    config.pop("scheduler", None)
    config["optimizer"] = {"type": "SGD", "params": {"lr": _RATE[scenario.storage]}}
    config["gradient_clipping"] = 0.0
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    # A second window leaves room for the first to overshoot.
    return Scenario.from_json({**scenario.to_json(), "config": config, "windows": 2})


def decompose(update: np.ndarray, gradients: np.ndarray, expected: list[list[float]]) -> ProbeResult:
    """Write `update` as a sum of the rows of `gradients`.

    Args:
        update: (P,) the step taken, as a gradient: (before - after) / lr.
        gradients: (passes * ranks, P), zero rows for idle passes.
        expected: [pass][rank] of w / total.
    """
    ranks = len(expected[0])
    norms = np.linalg.norm(gradients, axis=1)
    live = norms > 0
    basis = (gradients[live] / norms[live, None]).T
    solution, *_ = np.linalg.lstsq(basis, update, rcond=None)
    coefficients = np.zeros(len(norms))
    coefficients[live] = solution / norms[live]
    size = float(np.linalg.norm(update)) or 1.0
    wanted = np.array(expected).reshape(-1)
    measured = coefficients.reshape(-1, ranks)
    return ProbeResult(
        measured=measured.tolist(),
        expected=expected,
        residual=float(np.linalg.norm(update - basis @ solution)) / size,
        condition=_condition(basis, live, wanted),
        error=float(np.abs(coefficients - wanted).max() / wanted.max()),
        pattern=_pattern(measured, np.array(expected)),
    )


def _condition(basis: np.ndarray, live: np.ndarray, expected: np.ndarray) -> float:
    # More gradients than parameters, or one that is zero where a weight is due, have no coefficients of their own.
    if basis.shape[1] > basis.shape[0] or (~live & (expected > 0)).any():
        return float("inf")
    return float(np.linalg.cond(basis))


def _gradients(scenario: Scenario, passes: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return the initial weights, and every micro-batch's gradient as it would be alone, rank by rank within a pass."""
    model = scenario.build()
    scenario.keywords(model)  # it may freeze parameters
    model = {"bf16": model.bfloat16, "fp16": model.half}.get(scenario.storage, model.float)().float()
    start = weights.vector(model)
    settings = scenario.settings
    own = []
    for batch in own_batches(scenario)[:passes]:
        gradient = np.zeros(len(start))
        if batch.rollouts:
            model.zero_grad()
            loss = model(**{name: value.cpu() for name, value in batch.inputs.items()})
            loss.backward()
            gradient = torch.cat([_of(p) for p in model.parameters()]).double().numpy()
            if settings.loss_reduction == "sum":
                gradient = gradient / weight(batch, settings.loss_weight)
        own.append(gradient)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, np.stack(own))
    return start, np.stack(everyone[:: scenario.sequence_parallel], axis=1).reshape(-1, len(start))


def _of(parameter: torch.nn.Parameter) -> torch.Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()


def _update(scenario: Scenario, start: torch.Tensor, run: Callable[..., Any]) -> np.ndarray:
    after: list[torch.Tensor] = []

    def record(_: Any, module: torch.nn.Module) -> None:
        after.append(weights.vector(module))

    engine = run(scenario, record)
    engine.destroy()
    rate = scenario.config["optimizer"]["params"]["lr"]
    update: np.ndarray = ((start.double() - after[0].double()) / rate).numpy()
    return update


def _pattern(measured: np.ndarray, expected: np.ndarray) -> str:  # noqa: PLR0911  # one return a pattern
    """Name what the coefficients look like, from the plainest to the strangest; idle passes have no say."""
    near = 0.05 * expected.max()
    if not np.isfinite(measured).all():
        return "the update is not finite"
    if np.abs(measured - expected).max() <= near:
        return "as expected"
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
