"""Torch's own optimizer and scheduler for what a scenario gives DeepSpeed, and a scheduler that is moved by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import nn

from ds_parity.config.features import Wanted
from ds_parity.config.handed_on import without_comments
from ds_parity.errors import ConfigError
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.references.private_state import is_deepspeeds_schedule, schedule_of


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): torch has none, and DeepSpeed builds one.

    Defaults are DeepSpeed's (ops/lion, 0.19.8), not the paper's.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            mixing, keeping = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                direction = self.sign(momentum * mixing + parameter.grad * (1 - mixing))
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                momentum.mul_(keeping).add_(parameter.grad, alpha=1 - keeping)

    @staticmethod
    def sign(momentum: torch.Tensor) -> torch.Tensor:
        """Return which way each weight goes: -1, 0 or 1."""
        return momentum.sign()


class CPULion(Lion):
    """Lion as DeepSpeed's CPU kernel has it: 0 has a sign (tools/deepspeed_faults/lion_moves_unused_weights.py).

    What an optimizer makes of a gradient is DeepSpeed's, as its schedules are; the comparison is about the gradient.
    """

    @staticmethod
    def sign(momentum: torch.Tensor) -> torch.Tensor:
        """Return which way each weight goes: -1 or 1."""
        return torch.copysign(torch.ones_like(momentum), momentum)


# DeepSpeed's "Adam" decouples its weight decay unless adam_w_mode says otherwise (engine.py, 0.19.8).
_OPTIMIZERS: dict[str, Any] = {"adam": torch.optim.AdamW, "adamw": torch.optim.AdamW, "lion": Lion}
_DEEPSPEEDS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")


def optimizer_and_scheduler(scenario: Scenario, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer over `model`, and the scheduler or None: the client's own, or torch's for DeepSpeed's.

    A scheduler of DeepSpeed's stays DeepSpeed's: a schedule is a formula, and this one is the user's.

    Raises:
        ConfigError: the optimizer has no counterpart in torch.
    """
    keywords = scenario.keywords(model)
    parameters = list(keywords.get("model_parameters") or model.parameters())
    optimizer = keywords.get("optimizer")
    if optimizer is None:
        optimizer = _by_name(scenario.config, parameters)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameters)
    scheduler, section = keywords.get("lr_scheduler"), scenario.config.get("scheduler")
    if scheduler is None and section:
        scheduler = schedule_of(section["type"])(optimizer, **without_comments(section.get("params", {})))
    elif callable(scheduler):
        scheduler = scheduler(optimizer)
    return optimizer, scheduler


def _by_name(config: dict[str, Any], parameters: list[Any]) -> torch.optim.Optimizer:
    section = config.get("optimizer", {})
    kind = str(section.get("type", ""))
    optimizer = _OPTIMIZERS.get(kind.lower()) or _torch(kind) or _torch(kind.capitalize())
    if optimizer is None:
        raise ConfigError(
            f"optimizer.type is {section.get('type')!r}: the torch reference knows {', '.join(_OPTIMIZERS)} and what "
            "torch.optim has; choose one of these for the comparison"
        )
    given = without_comments(section.get("params", {}))
    options = {name: value for name, value in given.items() if name not in _DEEPSPEEDS}
    if kind.lower() in ("adam", "adamw") and not section.get("params", {}).get("torch_adam"):
        options.setdefault("weight_decay", 0.0)  # DeepSpeed's own kernels don't decay by default, torch's AdamW does
    if kind.lower() == "lion" and Wanted(config).value("zero_optimization.offload_optimizer.device") == "cpu":
        optimizer = CPULion
    if kind.lower() == "adam" and not section.get("params", {}).get("adam_w_mode", True):
        optimizer = torch.optim.Adam
    return optimizer(parameters, **options)  # type: ignore[no-any-return]


def _torch(kind: str) -> Any:
    optimizer = getattr(torch.optim, kind, None)
    is_one = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    return optimizer if is_one else None


def clip_limit(scenario: Scenario) -> float:
    """Return what the configuration clips gradients at; infinity: nowhere. DeepSpeed's default is 1."""
    return float(scenario.config.get("gradient_clipping", 1.0)) or float("inf")


def clipped_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scenario: Scenario, limit: float | None = None
) -> float | None:
    """Clip the gradient, as the configuration says or at another limit (> 0), and step.

    Returns:
        The norm before clipping; None where DeepSpeed takes none.
    """
    limit = clip_limit(scenario) if limit is None else limit
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    # Without clipping, DeepSpeed takes no norm on ZeRO 0 in fp32.
    taken = clip_limit(scenario) < float("inf") or Wanted(scenario.config).stage or scenario.storage != "fp32"
    return float(norm) if taken else None


class ByHand:
    """Puts a scheduler at nominal progress, as `lr_progress: rollout` says.

    Fractional where the scheduler is a function of its step, else in whole steps with the remainder carried.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._reached = self._progress = Fraction(0)

    def advance(self, reached: Fraction, applied: bool) -> None:
        """Go on by what a window contained, where its step was applied.

        Args:
            reached: what all windows contained so far, in targets.
            applied: whether this window's step was.
        """
        share, self._reached = reached - self._reached, reached
        if not applied:
            return
        before, self._progress = self._progress, self._progress + share
        if is_deepspeeds_schedule(self._scheduler):
            self._stand_at(float(self._progress) - 1)
        elif isinstance(self._scheduler, torch.optim.lr_scheduler.LambdaLR):
            self._scheduler.last_epoch = float(self._progress) - 1  # type: ignore[assignment]  # fractional, on purpose
            self._scheduler.step()
        else:
            for _ in range(int(self._progress) - int(before)):
                self._scheduler.step()

    def _stand_at(self, position: float) -> None:
        """Step to a position, or to the whole one beside it where the LR would not lie between those of the two."""
        whole = position // 1
        rates = {}
        for at in (whole + 1, whole, position):
            self._scheduler.step(at)
            rates[at] = [float(rate) for rate in self._scheduler.get_last_lr()]
        ends = [sorted(pair) for pair in zip(rates[whole], rates[whole + 1], strict=True)]
        beyond = [max(low - rate, rate - high) for rate, (low, high) in zip(rates[position], ends, strict=True)]
        if max(beyond) > 0:
            furthest = beyond.index(max(beyond))
            nearest = min((whole, whole + 1), key=lambda at: abs(rates[at][furthest] - rates[position][furthest]))
            self._scheduler.step(nearest)
