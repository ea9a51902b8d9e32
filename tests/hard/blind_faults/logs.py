"""Faults of the trace alone: the training is right."""

from __future__ import annotations

from statistics import fmean, median, pstdev

import torch
from torch import Tensor

from ds_parity.parity.running.scenario import Scenario
from ds_parity.planning.rollout import MicroBatch
from ds_parity.trace import StepRecord
from tests.hard.blind_faults.base import Fault, accumulated, from_all_ranks


def _rewards(batches: list[MicroBatch]) -> list[float]:
    return [one.reward for batch in batches for unit in batch.held for one in unit.sequences]


class LossOfTheStepBefore(Fault):
    name = "logged-loss-of-the-step-before"
    truth = "The logged loss is that of the step before."
    kind = "logging"

    before: float | None = None

    def loss(self, reported: float) -> float:
        before, self.before = self.before, reported
        return reported if before is None else before


class _Watching(Fault):
    """Keeps this rank's losses of the window."""

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.losses: list[tuple[float, float]] = []

    def noted(self, loss: Tensor, batch: MicroBatch, index: int) -> tuple[Tensor, float]:
        self.losses.append((float(loss.detach()), self.units(batch)))
        return super().noted(loss, batch, index)

    def written(self, line: StepRecord) -> StepRecord:
        by_rank, self.losses = from_all_ranks(self.losses), []
        own = self.logged(by_rank)
        return line if own is None or line.loss is None else line.model_copy(update={"loss": own})

    def logged(self, by_rank: list[list[tuple[float, float]]]) -> float | None:
        """Return the loss that is logged, from (loss, weight) of each micro-batch of each rank."""
        raise NotImplementedError


class LossOfRankZero(_Watching):
    name = "logged-loss-of-rank-zero"
    truth = "The logged loss is the mean of rank 0's micro-batches alone."
    kind = "logging"

    def logged(self, by_rank: list[list[tuple[float, float]]]) -> float | None:
        units = sum(own for _, own in by_rank[0])
        return sum(loss * own for loss, own in by_rank[0]) / units if units else None


class LossOfTheLastPass(_Watching):
    name = "logged-loss-of-the-last-micro-batch"
    truth = "The logged loss is that of the last micro-batch of the window on rank 0."
    kind = "logging"

    def logged(self, by_rank: list[list[tuple[float, float]]]) -> float | None:
        return by_rank[0][-1][0] if by_rank[0] else None


class LossMeanOfMeans(_Watching):
    name = "logged-loss-mean-of-means"
    truth = "The logged loss is the mean of the micro-batches' losses, each with the same weight."
    kind = "logging"

    def logged(self, by_rank: list[list[tuple[float, float]]]) -> float | None:
        return fmean(loss for own in by_rank for loss, _ in own)


class LossSummed(_Watching):
    name = "logged-loss-summed"
    truth = "The logged loss is the sum of the micro-batches' losses, not their mean."
    kind = "logging"

    def logged(self, by_rank: list[list[tuple[float, float]]]) -> float | None:
        return sum(loss for own in by_rank for loss, _ in own)


class LossMeanOfRanks(_Watching):
    name = "logged-loss-mean-of-ranks"
    truth = "The logged loss is the mean of the ranks' means, though ranks have different numbers of tokens."
    kind = "logging"

    def logged(self, by_rank: list[list[tuple[float, float]]]) -> float | None:
        means = [sum(loss * units for loss, units in own) / sum(units for _, units in own) for own in by_rank if own]
        return fmean(means)


class LossSmoothed(Fault):
    name = "logged-loss-smoothed"
    truth = "The logged loss is an exponential moving average."
    kind = "logging"

    smooth: float | None = None

    def loss(self, reported: float) -> float:
        self.smooth = reported if self.smooth is None else 0.6 * self.smooth + 0.4 * reported
        return self.smooth


class LossRounded(Fault):
    name = "logged-loss-in-bf16"
    truth = "The loss is converted to bf16 before it is logged."
    kind = "logging"

    def loss(self, reported: float) -> float:
        return float(torch.tensor(reported).bfloat16())


class LossWithoutSign(Fault):
    name = "logged-loss-negated"
    truth = "The logged loss has the opposite sign: it is the objective that is maximised."
    kind = "logging"

    def loss(self, reported: float) -> float:
        return -reported


class LossOverPasses(Fault):
    name = "logged-loss-divided-by-the-passes"
    truth = "The logged loss is also divided by the number of the window's passes."
    kind = "logging"

    def loss(self, reported: float) -> float:
        return reported / len(self.rows)


class LossCumulative(Fault):
    name = "logged-loss-mean-since-the-start"
    truth = "The logged loss is the mean over all steps since the start: its sum is never reset."
    kind = "logging"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.all: list[float] = []

    def loss(self, reported: float) -> float:
        self.all.append(reported)
        return fmean(self.all)


class _Norm(Fault):
    """The logged gradient norm is another number."""

    kind = "logging"

    def written(self, line: StepRecord) -> StepRecord:
        return line if line.grad_norm is None else line.model_copy(update={"grad_norm": self.norm(line.grad_norm)})

    def norm(self, own: float) -> float:
        raise NotImplementedError


class NormAfterClipping(_Norm):
    name = "logged-norm-after-clipping"
    truth = "The logged gradient norm is that after clipping."
    scenario = "clipped"

    def norm(self, own: float) -> float:
        return min(own, float(self.wanted.config["gradient_clipping"]))


class NormSquared(_Norm):
    name = "logged-norm-squared"
    truth = "The logged gradient norm lacks its square root."

    def norm(self, own: float) -> float:
        return own**2


class NormOfTheStepBefore(_Norm):
    name = "logged-norm-of-the-step-before"
    truth = "The logged gradient norm is that of the step before."

    before: float | None = None

    def norm(self, own: float) -> float:
        before, self.before = self.before, own
        return own if before is None else before


class NormOfAShard(_Norm):
    name = "logged-norm-of-one-shard"
    truth = "The logged gradient norm is that of the shard of rank 0, not of the whole gradient."
    stages = (1, 2)

    def before_step(self) -> None:
        own = torch.stack([one.norm() for one in accumulated(self.engine)]).norm()
        self.shard = from_all_ranks(float(own))[0]

    def norm(self, own: float) -> float:
        return self.shard


class NormSumOfShards(NormOfAShard):
    name = "logged-norm-sum-of-shards"
    truth = "The logged gradient norm is the sum of the norms of the ranks' shards, not the root of their squares' sum."

    def before_step(self) -> None:
        own = torch.stack([one.norm() for one in accumulated(self.engine)]).norm()
        self.shard = sum(from_all_ranks(float(own)))


class RateAfterTheStep(Fault):
    name = "logged-rate-after-the-step"
    truth = "The logged learning rate is that of the next step: it is read after the scheduler has moved."
    kind = "logging"

    def written(self, line: StepRecord) -> StepRecord:
        return line.model_copy(update={"lr": tuple(float(rate) for rate in self.engine.get_lr())})


class RateOfTheStart(Fault):
    name = "logged-rate-of-the-optimizer"
    truth = "The logged learning rate is the configured one, not that which the scheduler has set."
    kind = "logging"

    def written(self, line: StepRecord) -> StepRecord:
        configured = float(self.wanted.config["optimizer"]["params"]["lr"])
        return line.model_copy(update={"lr": tuple(configured for _ in line.lr)})


class _Metric(Fault):
    """The logged reward is another number."""

    kind = "logging"

    def metrics(self, batches: list[MicroBatch]) -> dict[str, float]:
        return super().metrics(batches) | {"reward": self.reward(_rewards(batches), batches)}

    def reward(self, rewards: list[float], batches: list[MicroBatch]) -> float:
        raise NotImplementedError


class RewardMedian(_Metric):
    name = "logged-reward-median"
    truth = "The logged reward is the median of the rewards, not their mean."

    def reward(self, rewards: list[float], batches: list[MicroBatch]) -> float:
        return median(rewards)


class RewardDeviation(_Metric):
    name = "logged-reward-deviation"
    truth = "The logged reward is the standard deviation of the rewards, not their mean."

    def reward(self, rewards: list[float], batches: list[MicroBatch]) -> float:
        return pstdev(rewards)


class RewardOfRankZero(_Metric):
    name = "logged-reward-of-rank-zero"
    truth = "The logged reward is the mean over the rollouts of rank 0 alone."

    def reward(self, rewards: list[float], batches: list[MicroBatch]) -> float:
        own = _rewards(batches[:: self.wanted.ranks])
        return fmean(own) if own else fmean(rewards)


class RewardMeanOfMeans(_Metric):
    name = "logged-reward-mean-of-means"
    truth = "The logged reward is the mean of the micro-batches' means, each with the same weight."

    def reward(self, rewards: list[float], batches: list[MicroBatch]) -> float:
        return fmean(fmean(_rewards([one])) for one in batches if one.held)


class RewardByTokens(_Metric):
    name = "logged-reward-weighed-by-tokens"
    truth = "The logged reward is weighed by the length of the completions."

    def reward(self, rewards: list[float], batches: list[MicroBatch]) -> float:
        held = [one for batch in batches for unit in batch.held for one in unit.sequences]
        return sum(one.reward * one.loss_tokens for one in held) / sum(one.loss_tokens for one in held)


class RewardIsAdvantage(_Metric):
    name = "logged-reward-is-the-advantage"
    truth = "The logged reward is the mean advantage."

    def reward(self, rewards: list[float], batches: list[MicroBatch]) -> float:
        return fmean(one.advantage for batch in batches for unit in batch.held for one in unit.sequences)


class TokensWithPrompt(Fault):
    name = "logged-tokens-with-prompts"
    truth = "The logged number of tokens includes the prompts."
    kind = "logging"

    def written(self, line: StepRecord) -> StepRecord:
        tokens = sum(len(one.tokens) for row in self.rows for batch in row for one in batch.held)
        return line.model_copy(update={"tokens": tokens})


class RolloutsOfRankZero(Fault):
    name = "logged-rollouts-of-rank-zero"
    truth = "The logged number of rollouts is that of rank 0 alone."
    kind = "logging"

    def written(self, line: StepRecord) -> StepRecord:
        return line.model_copy(update={"rollouts": sum(row[0].rollouts for row in self.rows)})


class LinesLate(Fault):
    name = "logged-lines-one-step-late"
    truth = "Loss and norm are logged one step late, because the logger is flushed before the step ends."
    kind = "logging"

    before: StepRecord | None = None

    def written(self, line: StepRecord) -> StepRecord:
        before, self.before = self.before, line
        if before is None:
            return line
        return line.model_copy(update={"loss": before.loss, "grad_norm": before.grad_norm})
