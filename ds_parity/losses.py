"""Losses that are put on any decoder: policy gradient, likelihood, and preferences. Micro-batches padded or packed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name by which torch's own documentation calls it)
from torch import Tensor, nn

from ds_parity.errors import ConfigError

_CHOICES = {
    "loss_weight": ("rollout", "token", "pass", "target"),
    "loss_reduction": ("mean", "sum"),
    "objective": ("policy_gradient", "nll"),
}


class PolicyGradient(nn.Module):
    """The loss of one micro-batch: token-level policy gradient, GRPO at ratio 1 (Shao et al. 2024, arXiv 2402.03300).

    Per loss token -advantage * logp. Its gradient is that of -advantage * ratio at ratio 1, whose value would be
    -advantage whatever the weights are: a trace of it could not show that two runs part. The units that these are
    summed over:

    - loss_weight "token": the loss tokens, all alike;
    - any other ("rollout", "pass", "target"): the rollouts, each with the mean over its own loss tokens.

    loss_reduction "mean" divides by the micro-batch's number of units, "sum" does not. To "pass" the micro-batch is one
    unit, so there the two are the same.

    Args:
        policy: called as policy(input_ids), packed as policy(input_ids, position_ids=...); returns logits (R, T, V) or an
            object that has them as `.logits`. Packed, what comes before a position 0 must not be seen after it.
        loss_weight: rollout | token | pass | target.
        loss_reduction: mean | sum.
        objective: policy_gradient, or nll: the negative log likelihood, for which advantages are passed over.

    Raises:
        ConfigError: one of the three choices is unknown.
    """

    def __init__(
        self,
        policy: nn.Module,
        loss_weight: str = "rollout",
        loss_reduction: str = "mean",
        objective: str = "policy_gradient",
    ) -> None:
        super().__init__()
        _check(loss_weight=loss_weight, loss_reduction=loss_reduction, objective=objective)
        self.policy = policy
        self.loss_weight = loss_weight
        self.loss_reduction = loss_reduction
        self.objective = objective

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        advantages: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the micro-batch's loss, a scalar in fp32 (in fp64 where the logits are).

        Token counts are clamped at 1: a micro-batch without loss tokens gives 0 * the logits, a loss of 0 whose
        gradient is 0 and reaches every parameter. A rollout without loss tokens has mean 0 and still counts as one.

        Args:
            input_ids: (B, T) int64, padded on the right, B >= 1; packed (1, T).
            loss_mask: (B, T - 1) float, 1 where input_ids[:, 1:] carries the loss, 0 elsewhere; packed (1, T - 1).
            advantages: (B,) float.
            position_ids: packed (1, T), 0 where a rollout starts.
            segment_ids: packed (1, T), the number of the rollout, from 0 to B - 1.
        """
        logits = logits_of(self.policy, input_ids, position_ids)[:, :-1]
        worth = advantages[:, None] if segment_ids is None else advantages[segment_ids[:, 1:]]
        losses = self.token_losses(logits, input_ids[:, 1:], worth)
        mask = loss_mask.to(losses.dtype)
        losses = losses * mask
        if segment_ids is not None:
            losses, mask = (by_segment(values, segment_ids, len(advantages)) for values in (losses, mask))
        return self.reduce(losses, mask)

    def token_losses(self, logits: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of every token (R, T) from logits (R, T, V), targets (R, T) and advantages (R, 1 or T)."""
        logp = token_logps(logits, targets)
        return -logp if self.objective == "nll" else -advantages.to(logp.dtype) * logp

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the micro-batch's loss from masked losses (B, any), which may be partial sums, and mask (B, T - 1)."""
        if self.loss_weight == "token":
            total = losses.sum()
            return total / mask.sum().clamp(min=1) if self.loss_reduction == "mean" else total
        means = losses.sum(-1) / mask.sum(-1).clamp(min=1)
        return means.sum() if self.loss_reduction == "sum" and self.loss_weight != "pass" else means.mean()


class DirectPreference(nn.Module):
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, eq. 7): -log sigmoid(beta * (margin - the reference's margin)).

    A micro-batch's loss is the mean over its pairs; with loss_weight "token" each pair weighs its loss tokens.

    Args:
        policy: as in `PolicyGradient`.
        beta: how dear it is to leave the reference (> 0).
        loss_weight: rollout (a pair is one) | token.

    Raises:
        ConfigError: the weight is another one.
    """

    def __init__(self, policy: nn.Module, beta: float = 0.1, loss_weight: str = "rollout") -> None:
        super().__init__()
        if loss_weight not in ("rollout", "token"):
            raise ConfigError(f"loss_weight = {loss_weight!r}: pairs are weighed by rollout or token")
        self.policy = policy
        self.beta = beta
        self.loss_weight = loss_weight

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        reference_logps: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the micro-batch's loss (scalar) and, pair by pair, margins (B,) and loss tokens (B,), without gradient.

        A margin is beta * (margin - the reference's): above 0, the policy prefers the chosen answer more than its reference
        does, and the pair counts as right.

        Args:
            input_ids: (2B, T) int64, chosen and rejected in turn; packed (1, T).
            loss_mask: (2B, T - 1) float; packed (1, T - 1).
            reference_logps: (B, 2), the sums of the reference's log probabilities.
            position_ids: packed (1, T), 0 where a sequence starts.
            segment_ids: packed (1, T), the number of the sequence, from 0 to 2B - 1.
        """
        logps, tokens = self.answers(input_ids, loss_mask, len(reference_logps), position_ids, segment_ids)
        apart = logps - reference_logps.to(logps.dtype)
        margins = self.beta * (apart[:, 0] - apart[:, 1])
        weights = tokens if self.loss_weight == "token" else torch.ones_like(tokens)
        loss = (-F.logsigmoid(margins) * weights).sum() / weights.sum().clamp(min=1)
        return loss, margins.detach(), tokens

    def answers(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        pairs: int,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what the policy gives the answers of B pairs, log probabilities (B, 2), and loss tokens (B,).

        Around a reference policy it makes the `reference_logps` of a micro-batch; other arguments as those of `forward`.
        """
        logits = logits_of(self.policy, input_ids, position_ids)[:, :-1]
        logps = token_logps(logits, input_ids[:, 1:])
        mask = loss_mask.to(logps.dtype)
        logps = logps * mask
        if segment_ids is not None:
            logps, mask = (by_segment(values, segment_ids, 2 * pairs) for values in (logps, mask))
        return logps.sum(-1).view(-1, 2), mask.sum(-1).view(-1, 2).sum(-1)


def logits_of(policy: nn.Module, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the logits (R, T, V) of a policy, told of positions only where sequences are packed."""
    packed: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    if packed and _caches(policy):
        packed["use_cache"] = False  # with a cache, Hugging Face's models don't look for packed sequences
    output: Any = policy(input_ids, **packed)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def _caches(policy: nn.Module) -> bool:
    config: Any = getattr(policy, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return hasattr(text, "use_cache") or hasattr(config, "use_cache")


def token_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (R, T), each target's log probability, in fp32 (in fp64 where the logits are)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def by_segment(values: Tensor, segment_ids: Tensor, segments: int) -> Tensor:
    """Return (segments, T - 1): a row for each packed sequence, 0 outside it.

    Sums over rows so stay sums in one order on every device, where scattered ones would not.

    Args:
        values: (1, T - 1), of the tokens from the second on.
        segment_ids: (1, T).
        segments: how many there are.
    """
    own = segment_ids[:, 1:] == torch.arange(segments, device=segment_ids.device)[:, None]
    return values.where(own, torch.zeros_like(values))


def _check(**given: str) -> None:
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(_CHOICES[name])}")
