"""What transformers' Trainer trains: a small Llama with random weights, over sequences of different lengths."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from tools.migrations.common import Found, Watch
from tools.migrations.trl_grpo.task import ROWS, VOCAB, Stepped, model, on_deepspeed

GAS, STEPS, LONGEST = 2, 4, 24
"""Micro-batches of a rank in a step, steps, and tokens of the longest sequence."""
KINDS = ("own", "means", "right")


def data() -> list[Found]:
    """Return sequences of one length, of which so many labels count as a draw says."""
    generator = torch.Generator().manual_seed(1)
    count = ROWS * GAS * STEPS * 2
    ids = torch.randint(3, VOCAB, (count, LONGEST), generator=generator)
    labels = ids.clone()
    for row, length in enumerate(torch.randint(2, LONGEST + 1, (count,), generator=generator).tolist()):
        labels[row, length:] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def trainer_of(config: Found, kind: str, probe: bool) -> Any:
    """Return the Trainer on DeepSpeed.

    Args:
        config: of DeepSpeed; the Trainer fills in its batch.
        kind: `own`: each rank divides by its own tokens; `means`: the model takes no num_items_in_batch; `right`.
        probe: train by plain SGD, without clipping.
    """
    given = transformers.TrainingArguments(
        **on_deepspeed(config, STEPS, GAS, probe), average_tokens_across_devices=kind != "own"
    )
    trainer = transformers.Trainer(model=model(), args=given, train_dataset=data())
    if kind == "means":
        # What the Trainer finds for a model whose forward takes no further keywords.
        trainer.model_accepts_loss_kwargs = False
    return trainer


def watched(trainer: Any, probe: bool, trace: Path | None, config: Found) -> Any:
    """Have a watch hear of the trainer's micro-batches and steps."""
    own, trainer.watch = trainer.compute_loss, None

    def compute_loss(engine: Any, inputs: Found, *args: Any, **more: Any) -> Any:
        if trainer.watch is None:
            probing = {"mean": mean, "twin": model()} if probe else {}
            trainer.watch = Watch(engine, trace=trace, config=config, **probing)
        tokens = int(inputs["labels"][:, 1:].ne(-100).sum())
        batch = SimpleNamespace(inputs=dict(inputs), tokens=tokens, rollouts=ROWS, idle=False)
        loss = own(engine, inputs, *args, **more)
        with torch.no_grad():
            trainer.watch.ran(batch, mean(engine.module, batch))
        return loss

    trainer.compute_loss = compute_loss
    trainer.add_callback(Stepped(trainer))
    return trainer


def mean(policy: nn.Module, batch: Any) -> Tensor:
    """Return the mean over a micro-batch's labels."""
    loss: Tensor = policy(input_ids=batch.inputs["input_ids"], labels=batch.inputs["labels"]).loss
    return loss


def ended(trainer: Any) -> list[Found]:
    """Train, and return what was seen of the engine's steps, with what the Trainer has logged."""
    dist.barrier()
    trainer.train()
    steps: list[Found] = trainer.watch.close()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.watch.engine.destroy()
    return [one | {"logged": loss} for one, loss in zip(steps, logged, strict=True)]
