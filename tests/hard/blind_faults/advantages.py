"""Faults of the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev, stdev

import torch
from torch import Tensor

from ds_parity.planning.rollout import Rollout
from tests.hard.blind_faults.base import OwnLoss, OwnRollouts, groups_of


class _ByGroup(OwnRollouts):
    """Advantages are computed anew from the rewards of each group."""

    def advantages(self, rewards: list[float]) -> list[float]:
        raise NotImplementedError

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        changed = list(rollouts)
        for places in groups_of(rollouts).values():
            if len(places) < 4:
                continue  # a part of a group says nothing of the others' rewards
            of_group = self.advantages([rollouts[at].reward for at in places])
            for at, advantage in zip(places, of_group, strict=True):
                changed[at] = replace(rollouts[at], advantage=advantage)
        return changed


class NotDividedByStd(_ByGroup):
    name = "advantages-without-std"
    truth = "Advantages are not divided by the standard deviation of their group."
    kind = "data"

    def advantages(self, rewards: list[float]) -> list[float]:
        return [reward - fmean(rewards) for reward in rewards]


class SampleStd(_ByGroup):
    name = "advantages-with-sample-std"
    truth = "Advantages are divided by the sample standard deviation (n - 1) of the group, not by that over n."
    kind = "data"

    def advantages(self, rewards: list[float]) -> list[float]:
        return [(reward - fmean(rewards)) / stdev(rewards) for reward in rewards]


class StdWithEpsilon(_ByGroup):
    name = "advantages-with-large-epsilon"
    truth = "An epsilon of 0.01 is added to the standard deviation that advantages are divided by."
    kind = "data"

    def advantages(self, rewards: list[float]) -> list[float]:
        return [(reward - fmean(rewards)) / (pstdev(rewards) + 0.01) for reward in rewards]


class LeaveOneOut(_ByGroup):
    name = "advantages-leave-one-out"
    truth = "A rollout's baseline is the mean of the others of its group (RLOO), and nothing is divided by a deviation."
    kind = "data"

    def advantages(self, rewards: list[float]) -> list[float]:
        total, others = sum(rewards), len(rewards) - 1
        return [reward - (total - reward) / others for reward in rewards]


class RawRewards(OwnRollouts):
    name = "rewards-as-advantages"
    truth = "The raw rewards are used in place of the advantages: no baseline is subtracted."
    kind = "data"

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        return [replace(one, advantage=one.reward) for one in rollouts]


class WhitenedOverWindow(OwnRollouts):
    name = "advantages-whitened-over-the-window"
    truth = "Advantages are normalised once more, over all rollouts of the window."
    kind = "data"

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        changed = list(rollouts)
        for places in windows:
            values = [rollouts[at].advantage for at in places]
            for at in places:
                normal = (rollouts[at].advantage - fmean(values)) / pstdev(values)
                changed[at] = replace(rollouts[at], advantage=normal)
        return changed


class WhitenedOverMicroBatch(OwnLoss):
    name = "advantages-normalised-over-the-micro-batch"
    truth = "Advantages are normalised over the micro-batch, not over the group of their prompt."
    kind = "loss"

    def gains(self, advantages: Tensor) -> Tensor:
        if len(advantages) < 2:
            return advantages
        return (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-6)


class CenteredOverMicroBatch(OwnLoss):
    name = "advantages-centred-over-the-micro-batch"
    truth = "The mean advantage of the micro-batch is subtracted from its advantages; a single rollout has none left."
    kind = "loss"

    def gains(self, advantages: Tensor) -> Tensor:
        return advantages - advantages.mean()


class Clipped(OwnLoss):
    name = "advantages-clipped"
    truth = "Advantages are clipped to the range from -1 to 1."
    kind = "loss"

    def gains(self, advantages: Tensor) -> Tensor:
        return advantages.clamp(-1, 1)


class Absolute(OwnLoss):
    name = "advantages-without-sign"
    truth = "The absolute values of the advantages are used."
    kind = "loss"

    def gains(self, advantages: Tensor) -> Tensor:
        return advantages.abs()


class NegativeDropped(OwnLoss):
    name = "negative-advantages-zeroed"
    truth = "Rollouts with a negative advantage have no loss."
    kind = "loss"

    def gains(self, advantages: Tensor) -> Tensor:
        return advantages.clamp(min=0)


class Integers(OwnLoss):
    name = "advantages-cast-to-integers"
    truth = "Advantages are cast to whole numbers, which cuts off their fractions."
    kind = "loss"

    def gains(self, advantages: Tensor) -> Tensor:
        return advantages.long().float()


class InBf16(OwnLoss):
    name = "advantages-in-bf16"
    truth = "Advantages are stored in bf16, which rounds them to three digits."
    kind = "loss"

    def gains(self, advantages: Tensor) -> Tensor:
        return advantages.bfloat16().float()


class OfTheNeighbour(OwnLoss):
    name = "advantages-of-the-neighbouring-row"
    truth = "Rows of a micro-batch are sorted and their advantages are not: each row has its neighbour's."
    kind = "loss"

    def gains(self, advantages: Tensor) -> Tensor:
        return advantages.roll(1)


class Discounted(OwnLoss):
    name = "advantages-discounted"
    truth = "Tokens further from the end of the completion have their advantage discounted by 0.99 each."
    kind = "loss"

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        ahead = torch.arange(logps.shape[1] - 1, -1, -1, device=logps.device)
        return super().of_tokens(logps, gains * 0.99**ahead, targets)


class ByLength(OwnLoss):
    name = "advantages-divided-by-length"
    truth = "Advantages are divided by the length of the completion relative to the longest of the micro-batch."
    kind = "loss"

    def mask(self, mask: Tensor, input_ids: Tensor) -> Tensor:
        lengths = mask.sum(1, keepdim=True)
        self.share = lengths.max() / lengths
        return mask

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return super().mean(losses * self.share, mask)
