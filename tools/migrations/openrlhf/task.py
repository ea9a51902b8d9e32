"""What both loops train: an actor and a critic over the same rollouts, each with an engine of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_parity.collation import collate
from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import logps_of, policy, rollouts
from tools.migrations.openrlhf import windows
from tools.migrations.openrlhf.windows import Row

ROLLOUTS = {"dynamic": 48, "fixed": 20}
"""Of an epoch: dynamic batches fill their windows, fixed ones leave half a window at its end."""
EPOCHS = {"dynamic": 1, "fixed": 2}
BATCH = {"dynamic": 16, "fixed": 8}
"""Rollouts of a window, on all ranks."""
MAX_TOKENS = 1024


def dealt(dynamic: bool) -> Iterator[list[Row]]:
    """Yield windows, each a list of passes."""
    kind = "dynamic" if dynamic else "fixed"
    yield from windows.epochs(
        rollouts(ROLLOUTS[kind]), EPOCHS[kind], dist.get_world_size(), BATCH[kind], MAX_TOKENS if dynamic else 0
    )


def tokens_of(window: Sequence[Row]) -> int:
    """Return the loss tokens of a window on all ranks; OpenRLHF sums them in an all-reduce."""
    return sum(one.loss_tokens for row in window for share in row for one in share)


def batch_of(row: Row) -> MicroBatch:
    """Return this rank's micro-batch of a pass."""
    return collate(row[dist.get_rank()])


class Critic(nn.Module):
    """The decoder with a value for each token in place of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = policy(1)
        width = self.body.head.in_features
        self.body.head = nn.Linear(width, 1, bias=False)
        with torch.no_grad():
            self.body.head.weight.normal_(std=1 / math.sqrt(width), generator=torch.Generator().manual_seed(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return (B, T, 1)."""
        values: Tensor = self.body(input_ids)
        return values


def actor_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the sum over tokens of the policy's loss, at ratio 1."""
    losses = -batch.inputs["advantages"][:, None] * logps_of(model, batch)
    return (losses * batch.inputs["loss_mask"]).sum()


def critic_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the sum over tokens of the squared error of the value; without discount the return is the reward."""
    values = model(batch.inputs["input_ids"])[:, :-1, 0]
    returns = torch.tensor([one.reward for one in batch.held])[:, None]
    return (0.5 * (values - returns) ** 2 * batch.inputs["loss_mask"]).sum()


def mean(loss: Tensor, batch: MicroBatch) -> Tensor:
    """Return the mean over a micro-batch's tokens."""
    return loss / batch.tokens
