"""Faults of what a micro-batch weighs, and of what a step's losses are divided by."""

from __future__ import annotations

import torch

from ds_parity.parity.subjects.oracle import PlannedWindow
from ds_parity.planning.rollout import MicroBatch
from tests.hard.blind_faults.base import Fault


class FirstTotalForEver(Fault):
    name = "first-total-for-ever"
    truth = "Every step is divided by the number of tokens of the first window."
    kind = "gradient"

    def total(self, index: int) -> float:
        return self.windows()[0].total


class TotalOfTheStepBefore(Fault):
    name = "total-of-the-step-before"
    truth = "Every step is divided by the number of tokens of the window before it."
    kind = "gradient"

    def total(self, index: int) -> float:
        return self.windows()[max(0, self.number - 2)].total


class TotalSmoothed(Fault):
    name = "total-smoothed"
    truth = "A step is divided by a running mean of the windows' tokens, not by its own."
    kind = "gradient"

    def total(self, index: int) -> float:
        totals = [window.total for window in self.windows()[: self.number]]
        smooth = totals[0]
        for one in totals[1:]:
            smooth = 0.5 * smooth + 0.5 * one
        return smooth


class LastPassNotCounted(Fault):
    name = "last-pass-not-in-the-total"
    truth = "The number of tokens that a step is divided by lacks those of the window's last pass."
    kind = "gradient"

    def total(self, index: int) -> float:
        own = sum(self.units(batch) for row in self.rows[:-1] for batch in row)
        return own or self.window.total


class PromptTokensCounted(Fault):
    name = "prompt-tokens-in-the-total"
    truth = "The number of tokens that a step is divided by includes the prompts' tokens."
    kind = "gradient"

    def total(self, index: int) -> float:
        return float(sum(len(one.tokens) for row in self.rows for batch in row for one in batch.held))


class OwnTokensOnly(Fault):
    name = "each-rank-divides-by-its-own-tokens"
    truth = "Each rank divides by the tokens of its own micro-batches, and then ranks are averaged."
    kind = "gradient"

    def total(self, index: int) -> float:
        own = sum(self.units(row[self.rank]) for row in self.rows)
        return own * self.wanted.ranks if own else self.window.total


class ConstantTotal(Fault):
    name = "constant-total"
    truth = "Every step is divided by a constant, 2048 tokens."
    kind = "gradient"

    def total(self, index: int) -> float:
        return 2048.0


class WeighedByRollouts(Fault):
    name = "rollouts-weigh-not-tokens"
    truth = "Micro-batches are weighed by their rollouts in the step, not by their tokens; the logged loss is right."
    kind = "gradient"

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        held = sum(len(one.held) for row in self.rows for one in row)
        return loss * (len(batch.held) * self.averaged() / held)


class DividedTwice(Fault):
    name = "divided-by-the-passes-too"
    truth = "The loss is also divided by the number of the window's passes, because two libraries do so."
    kind = "gradient"

    def divided(self, loss: torch.Tensor, batch: MicroBatch, index: int) -> torch.Tensor:
        return super().divided(loss, batch, index) / len(self.rows)


class SumOverRanks(Fault):
    name = "ranks-summed-not-averaged"
    truth = "The gradients of the ranks are summed where they should be averaged: the gradient is twice as large."
    kind = "gradient"

    def averaged(self) -> float:
        return super().averaged() * self.wanted.ranks


class IdlePassesCount(Fault):
    name = "stand-in-of-idle-passes-trained"
    truth = "The stand-in micro-batch of idle passes is trained on with a small weight instead of none."
    kind = "gradient"

    def silenced(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        return loss * (20 * self.averaged() / self.window.total)


class OpenWindowAsFull(Fault):
    name = "short-window-divided-as-a-full-one"
    truth = "The last window lacks rollouts, and its losses are divided as if it had them."
    kind = "gradient"

    def total(self, index: int) -> float:
        held = sum(batch.rollouts for row in self.rows for batch in row)
        return self.window.total * (self.settings.target / held if self._short() else 1)

    def _short(self) -> bool:
        window: PlannedWindow = self.window
        return window.open
