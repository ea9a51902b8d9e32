"""What both loops train: preference pairs in windows of ten, in micro-batches of two, two and one on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_parity.collation import collate
from ds_parity.losses import DirectPreference
from ds_parity.planning.rollout import MicroBatch, PreferencePair
from tools.migrations.common import policy, rollouts

PAIRS, BATCH, MICRO = 44, 5, 2
"""Pairs of the epoch; of a batch and of a micro-batch on each rank."""
RULES = ("alike", "tokens", "gas")


@cache
def pairs(count: int = PAIRS, longest: int = 512) -> tuple[PreferencePair, ...]:
    """Return so many pairs, a right and a wrong answer to each prompt."""
    groups = groupby(rollouts(4 * count, longest), key=lambda one: one.prompt_id)
    rated = [sorted(group, key=lambda one: one.reward) for _, group in groups]
    return tuple(PreferencePair(chosen=one[-1], rejected=one[0]) for one in rated)


@cache
def referred() -> tuple[PreferencePair, ...]:
    """Return the pairs with the log probabilities of a reference policy."""
    reference = DirectPreference(policy(1))
    found = []
    for one in pairs():
        given = collate([one]).inputs
        with torch.no_grad():
            ((chosen, rejected),) = reference.answers(given["input_ids"], given["loss_mask"], 1)[0].tolist()
        found.append(replace(one, chosen_logp=chosen, rejected_logp=rejected))
    return tuple(found)


def batches() -> Iterator[list[MicroBatch]]:
    """Yield this rank's batches of the epoch, each split into micro-batches; the last batch is shorter."""
    own = referred()[dist.get_rank() :: dist.get_world_size()]
    for at in range(0, len(own), BATCH):
        batch = own[at : at + BATCH]
        yield [collate(batch[start : start + MICRO]) for start in range(0, len(batch), MICRO)]


def built() -> DirectPreference:
    """Return the policy with its loss, the mean over pairs."""
    return DirectPreference(policy())


def mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the mean over a micro-batch's pairs."""
    loss: Tensor = model(**batch.inputs)[0]
    return loss
