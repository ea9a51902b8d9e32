"""What both loops train: packed micro-batches of a varying number of rollouts, which Fast-LLM calls documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from ds_parity.collation import collate
from ds_parity.losses import PolicyGradient
from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import Found, policy, rollouts
from tools.migrations.fast_llm import documents

COUNT, MOST, TARGET = 96, 768, 8
"""Rollouts, tokens of a micro-batch, and documents of a step."""
UNITS = {"documents": "rollout", "labels": "token"}
"""What each of their losses is a mean over, in the words of ds_parity."""


def rows() -> list[documents.Row]:
    """Return the passes."""
    return documents.rows(rollouts(COUNT), dist.get_world_size(), MOST)


def stream() -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches."""
    for row in rows():
        yield collate(row[dist.get_rank()], layout="packed")


def built(loss: str, reduction: str = "sum") -> PolicyGradient:
    """Return the policy with its loss: a sum over documents, or over labels."""
    return PolicyGradient(policy(), loss_weight=UNITS[loss], loss_reduction=reduction)


def units(batch: MicroBatch, loss: str) -> int:
    """Return how many documents or labels a micro-batch has."""
    return batch.rollouts if loss == "documents" else batch.tokens


def mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the mean over a micro-batch's documents or labels."""
    loss: Tensor = model(**batch.inputs)
    return loss


def write_log(path: Path, steps: Sequence[Found], losses: Sequence[float]) -> None:
    """Write what Fast-LLM gives to Weights & Biases, as its rows come back from there.

    Fast-LLM logs a dictionary of dictionaries (fast_llm/engine/training/trainer.py:304-329 and 351, wandb.py:49-54).
    """
    lines = [
        {
            "_step": number,
            "training.grpo": loss,
            "training.learning_rate": one["lr"],
            "training.grad_norm": one["grad_norm"],
            "training.num_documents": one["rollouts"],
            "training.completed_steps": number,
        }
        for number, (one, loss) in enumerate(zip(steps, losses, strict=True), start=1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
