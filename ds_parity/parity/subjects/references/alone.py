"""Reference `torch`: one process, no DeepSpeed engine, the whole window as one batch, in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ds_parity.collation import collate
from ds_parity.config import Settings
from ds_parity.parity.running.layouts import Layout, own_weight
from ds_parity.parity.running.own_batches import Record, begin
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import PlannedWindow, windows_of
from ds_parity.parity.subjects.references.bare import metrics_of
from ds_parity.parity.subjects.references.supposed import Suppositions
from ds_parity.parity.subjects.references.torch_steps import TorchSteps, rounded_model
from ds_parity.parity.subjects.references.whole_windows import train_on_whole_windows
from ds_parity.planning.rollout import Rollout


def train_alone(scenario: Scenario, record: Record) -> nn.Module:
    """Run every window as one batch; the weights start as the engine's do, rounded to its type.

    Where the scenario has a training function, that one runs the windows, on every rank.
    """
    if scenario.train is not None:
        return train_on_whole_windows(scenario, record)
    settings, layout, passes = scenario.settings, scenario.layout(), scenario.batches()
    model = rounded_model(scenario)
    begin(record, model)
    steps = TorchSteps(scenario, model)
    suppositions = Suppositions(scenario, model, steps.optimizer, record)
    for number, window in enumerate(windows_of(passes, settings), start=1):
        hypotheses = suppositions.of(window)
        loss, means = window_loss(model, layout, window, settings)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        batches = [batch for row in passes[window.first : window.last + 1] for batch in row]
        line = steps.step(number, window, batches, loss)
        shown = {"metrics": metrics_of(batches) | means, "hypotheses": hypotheses}
        record(line.model_copy(update=shown), model)
    return model


def window_loss(
    model: nn.Module, layout: Layout, window: PlannedWindow, settings: Settings
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Return sum(weight * loss) / total of a window from one forward over all its rollouts; None where total is 0.

    With several terms it is the sum over terms of coefficient * sum(weight * loss) / total. Beside it stand the terms'
    own means by name.
    """
    cells = [cell for row in layout[window.first : window.last + 1] for cell in row if cell]
    if not cells or window.total == 0:
        return None, {}
    batch = collate([rollout for cell in cells for rollout in cell]).inputs
    logits = model.policy(batch["input_ids"])  # type: ignore[operator]
    logp = getattr(logits, "logits", logits)[:, :-1].double().log_softmax(-1)
    chosen = logp.gather(-1, batch["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    mask = batch["loss_mask"].double()
    factor = batch["advantages"].double() if model.objective == "policy_gradient" else torch.ones_like(mask[:, 0])
    policy = -(chosen * mask).sum(-1) * factor
    if settings.terms is not None:
        return _of_terms(policy, chosen + math.log(logp.shape[-1]), mask, cells, window, settings)
    shares = _shares(cells, window.total, settings.loss_weight)
    if window.divided_by is not None:
        # The caller has multiplied means over tokens by tokens / divided_by, and a pass weighs 1.
        shares = _shares(cells, window.divided_by * window.total, "token")
    return (policy * torch.tensor(shares, dtype=torch.float64, device="cpu")).sum(), {}


def _of_terms(
    policy: torch.Tensor,
    beyond: torch.Tensor,
    mask: torch.Tensor,
    cells: Sequence[Sequence[Rollout]],
    window: PlannedWindow,
    settings: Settings,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the step's loss, and each term's own mean.

    Args:
        policy: (B,) the first term's losses, summed over the tokens of each rollout.
        beyond: (B, T - 1) of logp + log(V), of which the other terms are powers (`SeveralTerms`).
        mask: (B, T - 1), 1 for each loss token.
        cells: the rollouts of each micro-batch, B in all.
        window: what the terms are divided by.
        settings: with the terms.
    """
    loss, means = torch.zeros((), dtype=torch.float64, device="cpu"), {}
    for number, (name, term) in enumerate((settings.terms or {}).items()):
        total = window.totals[name]
        if not total:
            continue
        summed = (beyond ** (number + 1) / (number + 1) * mask).sum(-1) if number else policy
        shares = torch.tensor(_shares(cells, total, term.weight), dtype=torch.float64, device="cpu")
        mean = (summed * shares).sum()
        loss = loss + term.coefficient * mean
        # A mean of what is there, also where the step divides by a constant.
        held = sum(map(len, cells)) if term.weight == "target" else total
        means[name] = float(mean.detach()) * total / held
    return loss, means


def _shares(cells: Sequence[Sequence[Rollout]], total: float, unit: str) -> list[float]:
    """Return what each rollout's summed token loss is worth in the step."""
    shares = []
    for cell in cells:
        for rollout in cell:
            if unit == "token":
                shares.append(1 / total)
            elif unit == "pass":
                shares.append(1 / max(rollout.loss_tokens, 1) / len(cell) / total)
            elif unit == "weight":
                own = own_weight(sum(one.loss_tokens for one in cell))
                shares.append(own / max(rollout.loss_tokens, 1) / len(cell) / total)
            else:
                shares.append(1 / max(rollout.loss_tokens, 1) / total)
    return shares
