"""Reference `torch`: one process, no DeepSpeed engine, the whole window as one batch, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch import nn

from ds_parity.config import Settings
from ds_parity.errors import ConfigError
from ds_parity.parity.batches import Layout, collate
from ds_parity.parity.candidate import Record
from ds_parity.parity.oracle import PlannedWindow, plan
from ds_parity.parity.scenario import Scenario
from ds_parity.planning.records import Rollout
from ds_parity.trace import StepRecord

# DeepSpeed's "Adam" decouples its weight decay unless adam_w_mode says otherwise (engine.py, 0.19.8).
_OPTIMIZERS: dict[str, Any] = {"adam": torch.optim.AdamW, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
_OURS = {"torch_adam", "adam_w_mode"}


def run(scenario: Scenario, record: Record) -> nn.Module:
    """Run every window as one batch; the weights start as the engine's do, rounded to its type."""
    settings, layout, passes = scenario.settings, scenario.layout(), scenario.batches()
    model = _as_dtype(scenario.build(), scenario.dtype).double()
    optimizer = optimizer_of(scenario.config, model)
    scheduler = scheduler_of(scenario.config, optimizer)
    for number, window in enumerate(plan(passes, settings), start=1):
        loss = window_loss(model, layout, window, settings)
        if loss is not None:
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        lr = tuple(float(group["lr"]) for group in optimizer.param_groups)
        norm = None if loss is None else _step(model, optimizer, scenario.config)
        if scheduler is not None and loss is not None:
            scheduler.step(float(window.progress) - 1 if settings.lr_progress == "rollout" else None)
        batches = [batch for row in passes[window.first : window.last + 1] for batch in row]
        line = StepRecord(
            step=number,
            passes=1,
            idle_passes=0,
            rollouts=sum(batch.rollouts for batch in batches),
            prompts=sum(batch.prompts for batch in batches),
            tokens=sum(batch.tokens for batch in batches),
            total=window.total,
            loss=None if loss is None else float(loss.detach()),
            lr=lr,
            grad_norm=norm,
            skipped=loss is None,
        )
        record(line, model)
    return model


def window_loss(model: nn.Module, layout: Layout, window: PlannedWindow, settings: Settings) -> torch.Tensor | None:
    """Return sum(weight * loss) / total of a window from one forward over all its rollouts; None where total is 0."""
    rows = [held for row in layout[window.first : window.last + 1] for held in row if held]
    if not rows or window.total == 0:
        return None
    rollouts = [rollout for held in rows for rollout in held]
    shares = _shares(rows, window.total, settings.loss_weight)
    inputs = collate(rollouts).inputs
    logits = model.policy(inputs["input_ids"])  # type: ignore[operator]
    logp = getattr(logits, "logits", logits)[:, :-1].double().log_softmax(-1)
    chosen = logp.gather(-1, inputs["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    factor = (
        inputs["advantages"].double() if model.objective == "policy_gradient" else torch.ones(len(rollouts)).double()
    )
    sums = -(chosen * inputs["loss_mask"].double()).sum(-1) * factor
    loss: torch.Tensor = (sums * torch.tensor(shares, dtype=torch.float64)).sum()
    return loss


def _shares(rows: Sequence[Sequence[Rollout]], total: float, unit: str) -> list[float]:
    """Return what each rollout's summed token loss is worth in the step."""
    shares = []
    for held in rows:
        for rollout in held:
            if unit == "token":
                shares.append(1 / total)
            elif unit == "pass":
                shares.append(1 / max(rollout.loss_tokens, 1) / len(held) / total)
            else:
                shares.append(1 / max(rollout.loss_tokens, 1) / total)
    return shares


def optimizer_of(config: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer for the configuration's.

    Raises:
        ConfigError: it has no counterpart here.
    """
    section = config.get("optimizer", {})
    kind = str(section.get("type", "")).lower()
    if kind not in _OPTIMIZERS:
        raise ConfigError(
            f"optimizer.type is {section.get('type')!r}: the torch reference knows {', '.join(_OPTIMIZERS)}; choose one "
            "of these for the comparison"
        )
    parameters = {name: value for name, value in section.get("params", {}).items() if name not in _OURS}
    return _OPTIMIZERS[kind](model.parameters(), **parameters)  # type: ignore[no-any-return]


def scheduler_of(config: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return DeepSpeed's scheduler on torch's optimizer: a schedule is a formula, and this one is the user's."""
    section = config.get("scheduler")
    return None if not section else getattr(lr_schedules, section["type"])(optimizer, **section.get("params", {}))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> float:
    limit = config.get("gradient_clipping", 1.0) or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    return float(norm)


def _as_dtype(model: nn.Module, dtype: str) -> nn.Module:
    return {"bf16": model.bfloat16, "fp16": model.half}.get(dtype, model.float)()
