"""What both loops train: three batches of rollouts, and a schedule that falls to 0 over the steps it counts on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ds_parity.losses import PolicyGradient
from ds_parity.planning import Rollout
from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import policy, rollouts
from tools.migrations.roll.batches import counted

BATCH, BATCHES = 64, 3
"""Rollouts that are generated together, and how often."""
GAS, NOMINAL, MOST = 2, 4, 1024
"""Micro-batches of a step on each rank; rollouts of one by the configuration; and the tokens that bound it."""
RANKS = 2
LR = 1e-3


def generated() -> Iterator[tuple[Rollout, ...]]:
    """Yield the batches."""
    every = rollouts(BATCH * BATCHES)
    for at in range(0, len(every), BATCH):
        yield every[at : at + BATCH]


def built() -> tuple[PolicyGradient, Any, Any]:
    """Return the policy with its loss, AdamW and the schedule."""
    model = PolicyGradient(policy(), loss_weight="token")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    return model, optimizer, LambdaLR(optimizer, falling)


def falling(step: float) -> float:
    """Return the factor of the learning rate in a step: from 1 to 0 over the steps that are counted on."""
    return max(0.0, 1 - step / counted(BATCH * BATCHES, RANKS, NOMINAL, GAS))


def mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the mean over a micro-batch's tokens."""
    loss: Tensor = model(**batch.inputs)
    return loss
