"""Faults of the function that is minimised."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_parity.parity.running.scenario import Scenario
from ds_parity.planning.rollout import MicroBatch
from tests.hard.blind_faults.base import OwnLoss


class SignFlipped(OwnLoss):
    name = "loss-sign-flipped"
    truth = "The loss has the wrong sign: good rollouts become less likely."
    kind = "loss"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return -super().mean(losses, mask)


class Squared(OwnLoss):
    name = "loss-squared"
    truth = "The loss of each micro-batch is squared."
    kind = "loss"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return super().mean(losses, mask) ** 2


class ConstantAdded(OwnLoss):
    name = "constant-in-the-loss"
    truth = "A constant, 0.1, is added to the loss; the gradient is right."
    kind = "loss"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return super().mean(losses, mask) + 0.1


class EntropyBonus(OwnLoss):
    name = "entropy-bonus-left-on"
    truth = "An entropy bonus with the coefficient 0.01 is in the loss."
    kind = "loss"

    def logps(self, logits: Tensor, targets: Tensor) -> Tensor:
        logps = logits.log_softmax(-1)
        self.entropy = -(logps.exp() * logps).sum(-1)
        return super().logps(logits, targets)

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        return super().of_tokens(logps, gains, targets) - 0.01 * self.entropy


class _ByReference(OwnLoss):
    """A loss that knows the log probabilities under the initial model."""

    stages = (0, 1, 2)

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.initial = self.wanted.build().requires_grad_(False).to(self.engine.device).policy

    def logits(self, input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self.initial(input_ids)[:, :-1]
            self.old = OwnLoss.logps(self, logits, input_ids[:, 1:])
        return super().logits(input_ids)


class KlSubtracted(_ByReference):
    name = "kl-subtracted"
    truth = "A KL penalty to the initial model is in the loss with the wrong sign: it rewards moving away."
    kind = "loss"

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        ahead = self.old - logps
        return super().of_tokens(logps, gains, targets) - 0.1 * (ahead.exp() - ahead - 1)


class KlLeftOn(_ByReference):
    name = "kl-left-on"
    truth = "A KL penalty to the initial model with the coefficient 0.05 is added to the loss."
    kind = "loss"

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        ahead = self.old - logps
        return super().of_tokens(logps, gains, targets) + 0.05 * (ahead.exp() - ahead - 1)


class OldLogpsNeverRefreshed(_ByReference):
    name = "old-logps-never-refreshed"
    truth = "The loss is a clipped ratio to log probabilities of the initial policy, which are never computed anew."
    kind = "loss"

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        ratio = (logps - self.old).exp()
        return -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains)


class RatioOfOne(OwnLoss):
    name = "ratio-of-one"
    truth = (
        "The loss is the ratio of a probability to itself times the advantage: its value is wrong, its gradient not."
    )
    kind = "loss"

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        return -(logps - logps.detach()).exp() * gains


class LabelsSmoothed(OwnLoss):
    name = "labels-smoothed"
    truth = "The labels are smoothed by 0.1."
    kind = "loss"

    def logps(self, logits: Tensor, targets: Tensor) -> Tensor:
        return 0.9 * super().logps(logits, targets) + 0.1 * logits.log_softmax(-1).mean(-1)


class Temperature(OwnLoss):
    name = "temperature-in-the-loss"
    truth = "The logits are divided by a sampling temperature of 0.7 before the loss."
    kind = "loss"

    def logits(self, input_ids: Tensor) -> Tensor:
        return super().logits(input_ids) / 0.7


class ZLoss(OwnLoss):
    name = "z-loss-left-on"
    truth = "The squared log of the softmax denominator (z-loss, 0.001) is added to the loss."
    kind = "loss"

    def logps(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.normaliser = logits.logsumexp(-1)
        return super().logps(logits, targets)

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        return super().of_tokens(logps, gains, targets) + 1e-3 * self.normaliser**2


class MeanOfRows(OwnLoss):
    name = "mean-of-row-means"
    truth = "Each rollout of a micro-batch weighs the same in its loss, whatever its length; tokens should."
    kind = "loss"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return ((losses * mask).sum(1) / mask.sum(1)).mean()


class TokensInRolloutMean(OwnLoss):
    name = "mean-of-tokens-where-rollouts-weigh"
    truth = "The loss of a micro-batch is a mean over its tokens, though rollouts should weigh the same."
    kind = "loss"
    scenario = "rollouts"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return (losses * mask).sum() / mask.sum()


class NoLog(OwnLoss):
    name = "probability-without-log"
    truth = "The loss uses the probability of each token, not its logarithm."
    kind = "loss"

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        return -logps.exp() * gains


class LogpsClamped(OwnLoss):
    name = "logps-clamped"
    truth = "Log probabilities are clamped at -6, so that unlikely tokens have no gradient."
    kind = "loss"

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        return super().of_tokens(logps.clamp(min=-6), gains, targets)


class CountedWithOneMore(OwnLoss):
    name = "one-more-token-in-the-mean"
    truth = "The mean over a micro-batch's tokens is divided by one more than there are."
    kind = "loss"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return (losses * mask).sum() / (mask.sum() + 1)


class AuxiliaryLoss(OwnLoss):
    name = "auxiliary-loss-in-the-first-pass"
    truth = "An auxiliary loss, the mean squared logit, is added in the first pass of every window only."
    kind = "loss"

    def logits(self, input_ids: Tensor) -> Tensor:
        logits = super().logits(input_ids)
        self.auxiliary = 0.01 * logits.square().mean()
        return logits

    def divided(self, loss: Tensor, batch: MicroBatch, index: int) -> Tensor:
        added = self.auxiliary if index == self.window.first else 0.0
        return super().divided(loss + added, batch, index)


class Softcapped(OwnLoss):
    name = "logits-softcapped"
    truth = "The logits are capped softly at 10 (10 * tanh(logits / 10))."
    kind = "loss"

    def logits(self, input_ids: Tensor) -> Tensor:
        return 10 * (super().logits(input_ids) / 10).tanh()
