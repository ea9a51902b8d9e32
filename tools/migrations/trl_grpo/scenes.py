"""What is run for the page on TRL: two of its losses as they are, and divided by each step's tokens."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from trl import GRPOTrainer

import ds_parity
from tools.migrations.common import Found, compared, configuration
from tools.migrations.trl_grpo import after, before
from tools.migrations.trl_grpo.before import GAS, PER_GENERATION, STEPS
from tools.migrations.trl_grpo.task import ended, trainer_of, watched

LOSSES = ("bnpo", "dapo")


def found(folder: Path) -> Found:
    """Run everything; called on every rank, the traces lie in `folder`."""
    probing = configuration(before.CONFIG, 2, probe=False)  # the trainer is asked for SGD by its own arguments
    result: Found = {"probed": {loss: before.train(probing, loss, probe=True) for loss in LOSSES}}
    result["probed"] |= {f"{loss}, normalised": after.train(probing, loss, probe=True) for loss in LOSSES}
    result["probed"]["after"] = after.train(probing, after.BY_STEP, probe=True)
    result["trained"] = {loss: before.train(probing, loss, trace=folder / f"{loss}.jsonl") for loss in LOSSES}
    for loss in LOSSES:
        result["trained"][f"{loss}, normalised"] = after.train(probing, loss, trace=folder / f"{loss}.right.jsonl")
    result["trained"]["after"] = after.train(probing, after.BY_STEP, trace=folder / "after.jsonl")
    dist.barrier()  # the first rank writes the traces
    own = folder / "after.jsonl"
    result["compared"] = {loss: compared(own, folder / f"{loss}.jsonl") for loss in LOSSES}
    result["compared"] |= {f"{loss}, normalised": compared(own, folder / f"{loss}.right.jsonl") for loss in LOSSES}
    result["compared"] |= {f"{loss}, traces of the engine": _named(probing, loss, folder) for loss in LOSSES}
    return result


def _named(config: Found, loss: str, folder: Path) -> Found:
    """Return what compare says of two traces that engines of ds_parity have written: divided by them, and by TRL."""
    right, theirs = folder / f"{loss}.engine.jsonl", folder / f"{loss}.trl.jsonl"
    after.train(config | {"ds_parity": {"trace": str(right)}}, loss)
    own = config | {"ds_parity": {"trace": str(theirs)}}
    with ds_parity.install():
        trainer = trainer_of(watched(GRPOTrainer, probe=False), own, loss, STEPS, GAS, PER_GENERATION, probe=False)
        ended(trainer)
    dist.barrier()
    return compared(right, theirs)
