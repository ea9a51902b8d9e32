"""What a trainer holds: rollouts, pairs of them, and the micro-batches that they are cut into. None of them knows torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled trajectory, the unit that a step is counted in; or one turn of it.

    Attributes:
        prompt_id: what was asked; rollouts of one prompt form a group (GRPO).
        tokens: token ids, prompt first and completion after it.
        prompt_length: how many of `tokens` belong to the prompt; the rest carry the loss.
        reward: what the completion earned.
        advantage: what the reward is worth beside its group's (0 where all of a group earned alike).
        rollout_id: the same for all turns of a trajectory that is trained on as a sequence a turn; they count as one
            rollout, when the last of them has been run. None: this is a whole rollout.
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
        """The rows that it takes in a micro-batch: itself."""
        return (self,)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt, one preferred to the other (DPO): one unit of a step, never split over micro-batches.

    Attributes:
        chosen: the better answer.
        rejected: the worse one.
        chosen_logp: what a reference policy gives the answer, the sum of its tokens' log probabilities.
        rejected_logp: the same of the worse one.
    """

    chosen: Rollout
    rejected: Rollout
    chosen_logp: float = 0.0
    rejected_logp: float = 0.0

    @property
    def prompt_id(self) -> str:
        """What was asked."""
        return self.chosen.prompt_id

    @property
    def rollout_id(self) -> None:
        """A pair is whole."""
        return

    @property
    def loss_tokens(self) -> int:
        """The number of tokens of both answers that carry the loss (>= 0)."""
        return self.chosen.loss_tokens + self.rejected.loss_tokens

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        """The rows that it takes in a micro-batch."""
        return (self.chosen, self.rejected)


Unit: TypeAlias = Rollout | PreferencePair
"""What a plan deals out: never split over micro-batches."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank feeds to one forward and backward.

    Attributes:
        inputs: keyword arguments of the forward.
        rollouts: rollouts that it finishes (>= 0): all that it holds, but for turns that are not their rollout's last.
        prompts: prompts that it finishes (>= 0).
        tokens: loss tokens held (>= 0).
        held: what it was made of, row by row: ids, rewards and advantages of this micro-batch alone.
    """

    inputs: Mapping[str, Any] = field(repr=False)
    rollouts: int = 1
    prompts: int = 0
    tokens: int = 0
    held: tuple[Unit, ...] = field(default=(), repr=False)

    @property
    def idle(self) -> bool:
        """Whether it is an idle pass's: it finishes no rollout, and holds no loss token of one."""
        return not self.rollouts and not self.tokens
