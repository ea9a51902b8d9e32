"""Rollouts, preference pairs, and the micro-batches that are made of them, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# None of these has slots: a frozen class with slots would leave out, in a copy and in a pickle (one comes from every
# worker of a DataLoader), what a subclass has beside its fields.


@dataclass(frozen=True)
class Rollout:
    """One sampled trajectory, the unit that a step is counted in; or one turn of it.

    Attributes:
        prompt_id: the prompt, by its text or any name (a tensor or array by its value); rollouts of one prompt form a
            group (GRPO).
        tokens: token ids, prompt first and completion after it.
        prompt_length: how many of `tokens` belong to the prompt; the others carry the loss.
        reward: the reward of the completion.
        advantage: the reward beside those of its group (0 where all rewards of a group are equal): one finite number.
            What has one of each token (PPO, GAE) keeps them in a field of a subclass, for a loss of its own.
        rollout_id: the same for all turns of a trajectory that is trained on as one sequence per turn; they count as
            one rollout, when the last of them has run. None: this is a whole rollout.
    """

    prompt_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    reward: float = 0.0
    advantage: float = 0.0
    rollout_id: str | None = None

    @property
    def loss_tokens(self) -> int:
        """The number of tokens that carry the loss (>= 0)."""
        return len(self.tokens) - self.prompt_length

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        """The rows that it takes in a micro-batch: one, itself."""
        return (self,)


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, one preferred to the other (DPO): one unit of a step, never split over micro-batches.

    Attributes:
        chosen: the better answer.
        rejected: the worse one.
        chosen_logp: the log probability of the better answer under a reference policy: a sum over its tokens, in nats.
        rejected_logp: the same of the worse answer.
    """

    chosen: Rollout
    rejected: Rollout
    chosen_logp: float = 0.0
    rejected_logp: float = 0.0

    @property
    def prompt_id(self) -> str:
        """The prompt of both answers."""
        return self.chosen.prompt_id

    @property
    def rollout_id(self) -> None:
        """None: a pair is never one of several turns."""
        return

    @property
    def loss_tokens(self) -> int:
        """The number of tokens of both answers that carry the loss (>= 0)."""
        return self.chosen.loss_tokens + self.rejected.loss_tokens

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        """The rows that it takes in a micro-batch: chosen, then rejected."""
        return (self.chosen, self.rejected)


Unit: TypeAlias = Rollout | PreferencePair
"""What a plan deals out: never split over micro-batches."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank feeds to one forward and backward.

    Attributes:
        inputs: keyword arguments of the forward.
        rollouts: rollouts that it finishes (>= 0): all of its own, but for turns that are not their rollout's last.
        prompts: prompts that it finishes (>= 0).
        tokens: loss tokens in it (>= 0).
        held: the rollouts or pairs that it was made of, row by row, with their ids, rewards and advantages.
        weight: what its loss weighs, under `ds_parity.loss_weight` `weight` (finite and >= 0); or, with
            `ds_parity.terms`, weights by the names of terms: of those whose weight is `weight`, and 0 for those that
            it lacks.
        planned_for: the data-parallel ranks of the plan that it is part of, None where it is part of none. On any other
            number of ranks `engine.passes` refuses it, because some of the plan's micro-batches would run nowhere.
        plan_rank: the data-parallel rank for which it was planned (>= 0), None where it is part of no plan. Any other
            rank refuses it.
        plan_number: the same on all ranks that planned the same (1 to 2**32), None where it is part of no plan.
        plan_stream: tells the stream that yielded it from all others, None where it is part of no plan.
        plans_begun: numbers of the last plans of which the process that made it had begun a stream, 64 at most.
    """

    inputs: Mapping[str, Any] = field(repr=False)
    rollouts: int = 1
    prompts: int = 0
    tokens: int = 0
    held: tuple[Unit, ...] = field(default=(), repr=False)
    planned_for: int | None = field(default=None, repr=False)
    weight: float | Mapping[str, float] | None = None
    plan_rank: int | None = field(default=None, repr=False)
    plan_number: int | None = field(default=None, repr=False)
    plan_stream: int | None = field(default=None, repr=False)
    plans_begun: tuple[int, ...] = field(default=(), repr=False)

    @property
    def idle(self) -> bool:
        """Whether it is that of an idle pass: it finishes no rollout, has no loss token of one, and weighs nothing.

        A loop over `engine.passes` knows stand-ins by it, which hold the inputs of another micro-batch.
        """
        weighs = self.weight if isinstance(self.weight, int | float) else 0
        return not (self.rollouts or self.tokens or weighs)
