"""What both loops train: batches of rollouts that were generated together, four steps each, under a linear schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the name by which torch's own documentation calls it)
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.model import TinyDecoder
from ds_parity.parity.data.rollouts import PAD
from ds_parity.parity.subjects.ulysses import SequenceParallel
from ds_parity.planning import Rollout
from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import policy, rollouts
from tools.migrations.open_instruct import packs
from tools.migrations.open_instruct.packs import Cut

BATCH, BATCHES, MINI_BATCHES = 32, 4, 4
"""Rollouts that are generated together, how often, and the steps that each batch is meant to make."""
PACK = 1024
"""Tokens of a pack."""
LR = 1e-3


def generated(count: int = BATCHES) -> Iterator[tuple[Rollout, ...]]:
    """Yield so many batches."""
    for one in packs.batches(rollouts(BATCH * count), BATCH):
        yield tuple(one)


def cuts(ranks: int, count: int = BATCHES) -> Iterator[Cut]:
    """Yield the steps of each of so many batches as open-instruct cuts them."""
    for batch in generated(count):
        yield packs.cut(batch, ranks, PACK, MINI_BATCHES)


def built(probe: bool) -> tuple[PolicyGradient, Any, Any]:
    """Return the policy with its loss, AdamW and a schedule that falls to 0 over all steps that are counted on.

    A probe reads the gradient from the update: plain SGD then, and a learning rate that stays.
    """
    model = PolicyGradient(policy(), loss_weight="token")
    if probe:
        return model, torch.optim.SGD(model.parameters(), lr=0.1), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    counted = BATCHES * MINI_BATCHES
    return model, optimizer, LambdaLR(optimizer, lambda step: max(0.0, 1 - step / counted))


def mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the mean over a micro-batch's tokens."""
    loss: Tensor = model(**batch.inputs)
    return loss


def sequence_parallel(size: int) -> Any:
    """Return what DeepSpeed takes its groups from, None without sequence parallelism."""
    groups.mpu = None  # DeepSpeed keeps that of the engine before
    if size == 1:
        return None
    try:
        parallel_state_sp.get_sequence_parallel_group()
    except AssertionError:  # nobody has asked for groups yet
        parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp


class Sliced(SequenceParallel):
    """A loss over one rank's slice of each sequence: the sum over its own tokens, which no rank gathers."""

    def forward(self, input_ids: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:  # type: ignore[override]
        """Return the sum over this rank's tokens; shapes as in `PolicyGradient`."""
        ranks, length = dist.get_world_size(self._group), input_ids.shape[1]
        share = -(-length // ranks)
        beyond, first = share * ranks - length, dist.get_rank(self._group) * share
        own = slice(first, first + share)
        logits = self.policy(F.pad(input_ids, (0, beyond), value=PAD)[:, own], first=first)
        targets = F.pad(input_ids[:, 1:], (0, beyond + 1), value=PAD)[:, own]
        losses = self.token_losses(logits, targets, advantages[:, None])
        return (losses * F.pad(loss_mask, (0, beyond + 1))[:, own]).sum()


def sliced(whole: PolicyGradient, mpu: Any) -> nn.Module:
    """Return the model with each rank's slice as its loss; without sequence parallelism, a sum over all tokens."""
    assert isinstance(whole.policy, TinyDecoder)
    if mpu is None:
        whole.loss_reduction = "sum"
        return whole
    return Sliced(whole, mpu.get_sequence_parallel_group())
