"""What a trainer holds: rollouts, and the micro-batches that they are cut into. Neither knows torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled trajectory: the unit that a step is counted in.

    Attributes:
        prompt_id: what was asked; rollouts of one prompt form a group (GRPO).
        tokens: token ids, prompt first and completion after it.
        prompt_length: how many of `tokens` belong to the prompt; the rest carry the loss.
        reward: what the completion earned.
        advantage: what the reward is worth beside its group's (0 where all of a group earned alike).
    """

    prompt_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    reward: float = 0.0
    advantage: float = 0.0

    @property
    def loss_tokens(self) -> int:
        """The number of tokens that carry the loss (>= 0)."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank feeds to one forward and backward.

    Attributes:
        inputs: keyword arguments of the forward.
        rollouts: rollouts held (>= 0).
        prompts: prompts that these rollouts finish (>= 0).
        tokens: loss tokens held (>= 0).
    """

    inputs: Mapping[str, Any] = field(repr=False)
    rollouts: int = 1
    prompts: int = 0
    tokens: int = 0
