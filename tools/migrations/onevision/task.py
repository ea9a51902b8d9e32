"""What both loops train: micro-batches of one size, four of each rank in a step, under a schedule that falls to 0.

OneVision-Encoder trains a vision tower on images; what is in a micro-batch makes no difference to what is shown here,
so these are rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ds_parity.collation import collate
from ds_parity.losses import PolicyGradient
from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import policy, rollouts

EACH, RANKS, PASSES, STEPS = 2, 2, 4, 8
"""Samples of a micro-batch, ranks, micro-batches of a rank in a step, and steps that the data makes."""
TOTAL = STEPS * PASSES
"""Micro-batches of each rank: what OneVision-Encoder calls total_steps."""
LR, POWER, WARMUP = 1e-3, 2, 0.125
"""Its schedule rises over this share of its budget, and then falls with this power."""


def stream() -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches."""
    every = rollouts(EACH * RANKS * TOTAL, 256)
    own = every[dist.get_rank() :: dist.get_world_size()]
    for at in range(0, len(own), EACH):
        yield collate(own[at : at + EACH])


def built(budget: int, probe: bool) -> tuple[PolicyGradient, Any, Any]:
    """Return the model with its loss, AdamW, and the schedule over a budget of steps."""
    model = PolicyGradient(policy())
    if probe:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, LambdaLR(optimizer, lambda _: 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    return model, optimizer, LambdaLR(optimizer, lambda step: factor(step, budget))


def factor(step: int, budget: int) -> float:
    """Return the factor of the learning rate at a step of the schedule (>= 0)."""
    warm = int(budget * WARMUP)
    if step < warm:
        return (step + 1) / (warm + 1)
    return max(0.0, 1 - (step - warm) / (budget - warm)) ** POWER


def mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the mean over a micro-batch's samples."""
    loss: Tensor = model(**batch.inputs)
    return loss
