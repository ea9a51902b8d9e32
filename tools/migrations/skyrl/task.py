"""What both loops train: batches of prompts whose trajectories have one turn, two turns, or one for each line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ds_parity.collation import collate
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.rollouts import line_turns
from ds_parity.planning import Rollout, by_turn
from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import policy, rollouts

PROMPTS, MINI, SAMPLES = 8, 2, 4
"""Prompts of a training batch and of a mini-batch, and trajectories of a prompt."""
MICRO = 2
"""Sequences of a micro-batch."""
TURNS = ("one", "two", "lines")
"""How many turns the trajectories of each batch have."""
LR = 1e-3


def sequences(number: int, turns: str) -> list[Rollout]:
    """Return the sequences of a training batch: one for each turn of each trajectory."""
    size = PROMPTS * SAMPLES
    own = rollouts(size * (number + 1))[size * number :]
    if turns == "one":
        return list(own)
    if turns == "lines":
        return list(line_turns(own))
    return [turn for at, one in enumerate(own) for turn in _halves(one, f"{number}/{at}")]


def few() -> list[Rollout]:
    """Return one sequence for each of three prompts: fewer in a mini-batch than there are ranks."""
    return list(rollouts(3 * SAMPLES)[::SAMPLES])


def steps_counted_on(batches: int) -> int:
    """Return the steps that the schedule counts on (skyrl/train/trainer.py:512-514 in 25e2d415)."""
    return batches * PROMPTS // MINI


def built(batches: int, probe: bool) -> tuple[PolicyGradient, Any, Any]:
    """Return the policy with its loss, a sum over tokens, with AdamW and a schedule that falls to 0."""
    model = PolicyGradient(policy(), loss_weight="token", loss_reduction="sum")
    if probe:
        return model, torch.optim.SGD(model.parameters(), lr=0.1), None
    counted = steps_counted_on(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    return model, optimizer, LambdaLR(optimizer, lambda step: max(0.0, 1 - step / counted))


def twin() -> PolicyGradient:
    """Return a policy whose loss is the mean over tokens, to probe with."""
    return PolicyGradient(policy(), loss_weight="token")


def mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the mean over a micro-batch's tokens."""
    loss: Tensor = model(**batch.inputs)
    return loss


def micro_batches(share: Sequence[Rollout], whole: Sequence[Rollout]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a rank's share of a mini-batch; each says how many trajectories it finishes."""
    ends = {one.rollout_id: len(one.tokens) for one in whole}  # of the last turn
    for at in range(0, len(share), MICRO):
        held = share[at : at + MICRO]
        real = [one for one in held if one.loss_tokens]
        yield collate(
            held, rollouts=sum(one.rollout_id is None or ends[one.rollout_id] == len(one.tokens) for one in real)
        )


def _halves(one: Rollout, name: str) -> tuple[Rollout, ...]:
    middle = one.prompt_length + one.loss_tokens // 2
    return by_turn(one, [(one.prompt_length, middle), (middle, len(one.tokens))], name)
