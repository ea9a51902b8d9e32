"""Losses for any decoder: policy gradient, GRPO, negative log likelihood, and direct preference optimization.

Each is a module around a policy. It is called with the inputs of a micro-batch as `ds_parity.collate` makes them,
padded or packed, and returns the micro-batch's own loss: reduced as `loss_reduction` and `loss_weight` of the
configuration say, and not divided by anything that belongs to the window, which the engine does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name by which torch's own documentation calls it)
from torch import Tensor, nn

from ds_parity.errors import ConfigError
from ds_parity.token_losses import difference, logits_of, masked, reduced, token_logps

_CHOICES = {
    "loss_weight": ("rollout", "token", "pass", "target"),
    "loss_reduction": ("mean", "sum"),
    "objective": ("policy_gradient", "nll"),
}


class PolicyGradient(nn.Module):
    """The token-level policy gradient of one micro-batch.

    This is the objective of GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.1) at ratio 1, without clipping and
    without a KL term. The loss of a token is -advantage * logp, in nats. Its gradient is that of -advantage * ratio at
    ratio 1; the value of the latter is -advantage whatever the weights are, so a trace of it could not show that two
    runs differ. The loss of the micro-batch is made of the losses of:

    - loss_weight "token": the loss tokens, which all count the same;
    - any other ("rollout", "pass", "target"): the rollouts, each with the mean over its own loss tokens.

    loss_reduction "mean" divides by the number of units in the micro-batch, "sum" does not. With loss_weight "pass" the
    micro-batch is one unit, and its loss is the mean over its rollouts under both. Dr. GRPO's sum over tokens with a
    constant denominator (Liu et al. 2025, arXiv 2503.20783) is "token" with "sum" here, under a configuration whose
    loss_weight is "target" and whose loss_reduction is "sum".

    Args:
        policy: called as policy(input_ids), or policy(input_ids, position_ids=...) where sequences are packed. It
            returns logits (R, T, V), or an object that has them as `.logits`. With packed sequences, no token may
            attend to what lies before the position 0 of its own sequence.
        loss_weight: rollout | token | pass | target.
        loss_reduction: mean | sum.
        objective: policy_gradient, or nll: the negative log likelihood, which ignores the advantages.

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
        """Compute the loss of a micro-batch of B rollouts.

        Token counts are clamped at 1: a micro-batch without loss tokens gives 0 * the logits, a loss of 0 whose
        gradient is 0 and reaches every parameter. A rollout without loss tokens has mean 0 and still counts as one.

        Args:
            input_ids: (B, T) int64, padded on the right, B >= 1; packed (1, T).
            loss_mask: (B, T - 1) float, 1 where input_ids[:, 1:] carries the loss, 0 elsewhere; packed (1, T - 1).
            advantages: (B,) float, one number a rollout.
            position_ids: packed (1, T) int64, 0 where a rollout starts; None where rollouts are padded.
            segment_ids: packed (1, T) int64, the number of the rollout, from 0 to B - 1; None where they are padded.

        Returns:
            A scalar in fp32 (in fp64 where the logits are fp64).

        Raises:
            ConfigError: `advantages` have another shape.
        """
        _check_advantages(advantages, None if segment_ids is not None else len(input_ids))
        logits = logits_of(self.policy, input_ids, position_ids)[:, :-1]
        by_token = advantages[:, None] if segment_ids is None else advantages[segment_ids[:, 1:]]
        losses = self.token_losses(logits, input_ids[:, 1:], by_token)
        return self.reduce(*masked(losses, loss_mask, segment_ids, len(advantages)))

    def token_losses(self, logits: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
        """Compute the loss of every token, before the mask.

        Args:
            logits: (R, L, V), of the tokens that come before the targets.
            targets: (R, L) int64 token ids, each in [0, V).
            advantages: (R, 1) or (R, L) float; "nll" ignores them.

        Returns:
            (R, L) in fp32 (in fp64 where the logits are fp64).
        """
        logp = token_logps(logits, targets)
        return -logp if self.objective == "nll" else -advantages.to(logp.dtype) * logp

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Reduce the token losses of a micro-batch of B rollouts to its loss.

        Args:
            losses: (B, any) float, masked already; they may be partial sums over a rollout's tokens.
            mask: (B, T - 1) float, 1 for each loss token of a rollout and 0 elsewhere.

        Returns:
            A scalar in the dtype of the losses.
        """
        return reduced(losses, mask, self.loss_weight, self.loss_reduction)


class GroupRelativePolicy(nn.Module):
    """Group relative policy optimization (GRPO), for rollouts that were sampled by an older policy.

    With rho = exp(logp - sampled logp) of a token, both in nats, and A the advantage of its rollout, a token's loss is

        -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)

    (DeepSeekMath, Shao et al. 2024, arXiv 2402.03300, equation 3; with bounds of their own below and above: DAPO, Yu et
    al. 2025, arXiv 2503.14476, section 3.1). `ratio_cap` also bounds rho from above where A is negative, where the
    formula above does not (TRL's `delta`; INTELLECT-2, 2025, arXiv 2505.07291). The KL divergence to a
    reference policy is a term of its own, estimated for each token by k3 = exp(d) - d - 1, d = reference logp - logp,
    which is never negative (Schulman 2020, joschu.net/blog/kl-approx.html; DeepSeekMath, equation 4). `kl_corrected`
    takes rho times that, whose gradient is that of the divergence for rollouts of an older policy, too (DeepSeek-V3.2,
    2025, arXiv 2512.02556; TRL's `use_bias_correction_kl`, which it switches on by default).

    Token losses become the micro-batch's as those of `PolicyGradient` do: a mean or a sum over rollouts ("rollout",
    DeepSeekMath) or over loss tokens ("token", DAPO). `length` divides the sum over a rollout's tokens by that constant
    in place of the number of its tokens: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2). The names of TRL's
    losses (trl/trainer/grpo_trainer.py, `_compute_loss`, 1.16): its grpo is "rollout", bnpo is "token", dr_grpo is
    "rollout" with length = max_completion_length. Its dapo is "token" over the whole step, which the engine computes.

    Args:
        policy: as in `PolicyGradient`.
        loss_weight: rollout | token | pass | target.
        loss_reduction: mean | sum.
        clip_low: how far below 1 a ratio counts, in [0, 1].
        clip_high: how far above 1 a ratio counts (>= 0).
        ratio_cap: the greatest ratio of any token (>= 1 + clip_high and > 1), None: no bound but the clipping.
        length: what a rollout's sum over tokens is divided by (> 0, finite, tokens), None: its own loss tokens.
        kl_weight: rollout | token | pass | target, what the KL term is a mean over; None: as `loss_weight`.
        kl_corrected: whether the KL of a token is multiplied by its ratio.

    Raises:
        ConfigError: a choice is unknown, or a number is out of its range.
    """

    def __init__(
        self,
        policy: nn.Module,
        loss_weight: str = "rollout",
        loss_reduction: str = "mean",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        ratio_cap: float | None = None,
        length: float | None = None,
        kl_weight: str | None = None,
        kl_corrected: bool = False,
    ) -> None:
        super().__init__()
        self.kl_weight = loss_weight if kl_weight is None else kl_weight
        _check(loss_weight=loss_weight, loss_reduction=loss_reduction)
        if self.kl_weight not in _CHOICES["loss_weight"]:
            raise ConfigError(f"kl_weight = {kl_weight!r}: must be one of {', '.join(_CHOICES['loss_weight'])}")
        _check_clipping(clip_low, clip_high, ratio_cap)
        if length is not None and (loss_weight == "token" or not _number(length) > 0):
            raise ConfigError(
                f"length = {length!r} with loss_weight = {loss_weight!r}: it is the number of tokens (> 0, finite) "
                "that the sum of one rollout is divided by; leave it out where the loss is a mean over tokens"
            )
        self.policy = policy
        self.loss_weight = loss_weight
        self.loss_reduction = loss_reduction
        self.clip_low, self.clip_high = clip_low, clip_high
        self.ratio_cap = ratio_cap
        self.length = length
        self.kl_corrected = kl_corrected

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        advantages: Tensor,
        sampled_logps: Tensor,
        reference_logps: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the losses of a micro-batch of B rollouts.

        Args:
            input_ids: (B, T) int64, padded on the right, B >= 1; packed (1, T).
            loss_mask: (B, T - 1) float, 1 where input_ids[:, 1:] carries the loss, 0 elsewhere; packed (1, T - 1).
            advantages: (B,) float, one number a rollout.
            sampled_logps: of the shape of loss_mask, in nats: what the policy that sampled gave each token of
                input_ids[:, 1:]. What stands where the mask is 0 is not read.
            reference_logps: likewise of the reference policy, see `logps`; None: there is no KL term.
            position_ids: packed (1, T) int64, 0 where a rollout starts; None where rollouts are padded.
            segment_ids: packed (1, T) int64, the number of the rollout, from 0 to B - 1; None where they are padded.

        Returns:
            The policy loss (scalar), the KL loss (scalar, without a coefficient; None without a reference), and (B,)
            the share of each rollout's tokens that clipping has cut off, in [0, 1] and without gradient. Give both
            losses to the engine as terms: `engine.backward({"policy": policy, "kl": kl}, ...)` with `ds_parity.terms`.

        Raises:
            ConfigError: advantages, or log probabilities, have another shape.
        """
        _check_advantages(advantages, None if segment_ids is not None else len(input_ids))
        _check_logps(loss_mask, sampled_logps=sampled_logps, reference_logps=reference_logps)
        logp = self.logps(input_ids, position_ids)
        by_token = (advantages[:, None] if segment_ids is None else advantages[segment_ids[:, 1:]]).to(logp.dtype)
        ratio = difference(logp, sampled_logps, loss_mask).exp()
        losses, clipped = self.token_losses(ratio, by_token)
        rollouts = len(advantages)
        cut, mask = masked(clipped.to(logp.dtype), loss_mask, segment_ids, rollouts)
        policy = self._reduced(losses, loss_mask, segment_ids, rollouts, self.loss_weight)
        kl = None
        if reference_logps is not None:
            apart = difference(reference_logps.to(logp.dtype), logp, loss_mask)
            k3 = apart.exp() - apart - 1
            weighed = k3 * ratio if self.kl_corrected else k3
            kl = self._reduced(weighed, loss_mask, segment_ids, rollouts, self.kl_weight)
        return policy, kl, cut.sum(-1) / mask.sum(-1).clamp(min=1)

    def logps(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Compute what the policy gives each token of input_ids[:, 1:].

        Called under `torch.no_grad()` on a `GroupRelativePolicy` around the reference policy, it gives the
        `reference_logps` of a micro-batch; around the policy as it sampled, the `sampled_logps`.

        Args:
            input_ids: as in `forward`.
            position_ids: as in `forward`.

        Returns:
            (R, T - 1) in nats, fp32 (fp64 where the logits are fp64).
        """
        logits = logits_of(self.policy, input_ids, position_ids)[:, :-1]
        return token_logps(logits, input_ids[:, 1:])

    def token_losses(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of every token, before the mask.

        Args:
            ratio: (R, L) float, rho of each token (> 0).
            advantages: (R, 1) or (R, L) float.

        Returns:
            The losses (R, L), and (R, L) bool, where clipping has cut a token off: its gradient is 0.
        """
        low, high = 1 - self.clip_low, 1 + self.clip_high
        bounded = ratio if self.ratio_cap is None else ratio.clamp(max=self.ratio_cap)
        losses = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
        # Above the greatest ratio nothing is left of a token, whatever the sign of its advantage.
        most = math.inf if self.ratio_cap is None else self.ratio_cap
        above = ((ratio > high) & (advantages > 0)) | ((ratio > most) & (advantages < 0))
        return losses, ((ratio < low) & (advantages < 0)) | above

    def _reduced(
        self, losses: Tensor, loss_mask: Tensor, segment_ids: Tensor | None, rollouts: int, weight: str
    ) -> Tensor:
        summed = masked(losses, loss_mask, segment_ids, rollouts)
        return reduced(*summed, weight, self.loss_reduction, None if weight == "token" else self.length)


class DirectPreference(nn.Module):
    """Direct preference optimization of one micro-batch (DPO, Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    The loss of a pair is -log sigmoid(beta * (margin - the reference's margin)), where a margin is the log probability
    of the chosen answer minus that of the rejected one, in nats. The loss of the micro-batch is the mean over its
    pairs; with loss_weight "token" each pair weighs as many as it has loss tokens.

    Args:
        policy: as in `PolicyGradient`.
        beta: the strength of the pull towards the reference policy (> 0, finite, dimensionless).
        loss_weight: rollout (a pair counts as one) | token.

    Raises:
        ConfigError: the loss weight is another one, or beta is out of its range.
    """

    def __init__(self, policy: nn.Module, beta: float = 0.1, loss_weight: str = "rollout") -> None:
        super().__init__()
        if loss_weight not in ("rollout", "token"):
            raise ConfigError(f"loss_weight = {loss_weight!r}: pairs are weighed by rollout or token")
        if not _number(beta) > 0:
            raise ConfigError(
                f"beta = {beta!r}: it must be a finite number above 0; with 0 nothing is learned, and below it the "
                "rejected answer is preferred"
            )
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
        """Compute the loss of a micro-batch of B pairs.

        Args:
            input_ids: (2B, T) int64, chosen and rejected in turn, padded on the right; packed (1, T).
            loss_mask: (2B, T - 1) float, 1 where input_ids[:, 1:] carries the loss, 0 elsewhere; packed (1, T - 1).
            reference_logps: (B, 2) float, the log probability that the reference policy gives the chosen and the
                rejected answer: sums over loss tokens, in nats.
            position_ids: packed (1, T) int64, 0 where a sequence starts; None where sequences are padded.
            segment_ids: packed (1, T) int64, the number of the sequence, from 0 to 2B - 1; None where they are padded.

        Returns:
            The loss (scalar), the margins (B,) and the loss tokens (B,) of the pairs, the last two without gradient. A
            margin here is beta * (margin - the reference's margin): above 0 the policy prefers the chosen answer by
            more than its reference does, and the pair counts as right.

        Raises:
            ConfigError: `reference_logps` have another shape.
        """
        if reference_logps.ndim != 2 or reference_logps.shape[1] != 2:
            raise ConfigError(
                f"reference_logps have the shape {tuple(reference_logps.shape)}, must be (B, 2): of each pair the "
                "chosen and the rejected answer; give sums over their tokens, as `answers` returns them"
            )
        if segment_ids is None and len(input_ids) != 2 * len(reference_logps):
            raise ConfigError(
                f"reference_logps have {len(reference_logps)} rows, and input_ids {len(input_ids)}: each pair has one "
                "row there and two here, the chosen answer and the rejected one"
            )
        logps, tokens = self.answers(input_ids, loss_mask, len(reference_logps), position_ids, segment_ids)
        log_ratios = logps - reference_logps.to(logps.dtype)
        margins = self.beta * (log_ratios[:, 0] - log_ratios[:, 1])
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
        """Compute the log probabilities of the answers of B pairs under the policy.

        Called on a `DirectPreference` around the reference policy, it gives the `reference_logps` of a micro-batch.

        Args:
            input_ids: as in `forward`.
            loss_mask: as in `forward`.
            pairs: B, how many pairs the micro-batch has.
            position_ids: as in `forward`.
            segment_ids: as in `forward`.

        Returns:
            Log probabilities (B, 2) of the chosen and the rejected answer, summed over loss tokens, in nats, and the
            loss tokens (B,) of both together.
        """
        logits = logits_of(self.policy, input_ids, position_ids)[:, :-1]
        logps = token_logps(logits, input_ids[:, 1:])
        logps, mask = masked(logps, loss_mask, segment_ids, 2 * pairs)
        return logps.sum(-1).view(-1, 2), mask.sum(-1).view(-1, 2).sum(-1)


def _check_advantages(advantages: Tensor, rows: int | None) -> None:
    # Torch would spread others over rows, and multiply a rollout's tokens by the advantages of other rollouts.
    if advantages.ndim != 1 or rows not in (None, len(advantages)):
        raise ConfigError(
            f"advantages have the shape {tuple(advantages.shape)}, must be (B,), one number a rollout"
            f"{'' if rows is None else f': input_ids have {rows} rows'}; with one of each token (PPO, GAE) write a "
            "loss of your own, for example a subclass whose forward() gives them to token_losses()"
        )


def _check_logps(loss_mask: Tensor, **given: Tensor | None) -> None:
    for name, logps in given.items():
        if logps is not None and logps.shape != loss_mask.shape:
            raise ConfigError(
                f"{name} have the shape {tuple(logps.shape)}, must be {tuple(loss_mask.shape)} as loss_mask is: one "
                "number for each token of input_ids[:, 1:], in nats; fill up what is not sampled with 0"
            )


def _check_clipping(clip_low: float, clip_high: float, ratio_cap: float | None) -> None:
    low, high = _number(clip_low), math.inf if clip_high == math.inf else _number(clip_high)
    cap = math.inf if ratio_cap in (None, math.inf) else _number(ratio_cap)
    # Below it, clipping would bound a ratio above the cap where the advantage is negative, for which the cap is there.
    # 1 + 0.128 is not the number 1.128.
    if not 0 <= low <= 1 or not high >= 0 or not (cap > 1 and cap >= (1 + high) * (1 - 1e-12)):
        raise ConfigError(
            f"clip_low = {clip_low!r}, clip_high = {clip_high!r}, ratio_cap = {ratio_cap!r}: a ratio counts from "
            "1 - clip_low to 1 + clip_high, so clip_low is in [0, 1] and clip_high >= 0; ratio_cap is above 1 and not "
            "below 1 + clip_high (a smaller one is not the greatest ratio where advantages are negative), or None"
        )


def _number(value: Any) -> float:
    """Return a finite number; NaN where it is none, or not finite."""
    if isinstance(value, str | bytes):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _check(**given: str) -> None:
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(_CHOICES[name])}")
