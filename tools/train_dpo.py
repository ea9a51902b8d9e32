"""DPO on preference pairs, to be copied: a pair counts as one rollout, and is never split over micro-batches.

    deepspeed --num_accelerators 2 tools/train_dpo.py --deepspeed_config ds_configs/zero2_bf16.json

A run that was stopped, or killed, goes on with --resume, and leaves the trace of one that never was.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from trainer import Run, configuration, drawn, launch

import ds_parity
from ds_parity.losses import DirectPreference
from ds_parity.parity.data.rollouts import load_rollouts
from ds_parity.parity.running.functions import resolve


def pairs(rollouts: Iterable[ds_parity.Rollout]) -> Iterator[ds_parity.PreferencePair]:
    """Yield each prompt's best answer beside its worst, where one is better than the other."""
    for _, group in groupby(sorted(rollouts, key=attrgetter("prompt_id")), key=attrgetter("prompt_id")):
        answers = sorted(group, key=attrgetter("reward"))
        if answers[0].reward < answers[-1].reward:
            yield ds_parity.PreferencePair(chosen=answers[-1], rejected=answers[0])


def with_reference(reference: DirectPreference, micro_batch: ds_parity.MicroBatch) -> dict[str, Any]:
    """Return the inputs of a micro-batch, with what the policy gave its answers before it was trained."""
    inputs = dict(micro_batch.inputs)
    known = inputs.pop("reference_logps")
    with torch.no_grad():
        return inputs | {"reference_logps": reference.answers(pairs=len(known), **inputs)[0]}


def main(args: argparse.Namespace) -> None:
    """Train one rank."""
    config, settings = configuration(args)
    if settings.loss_reduction != "mean":
        raise ds_parity.ConfigError(
            f"{args.deepspeed_config}: ds_parity.loss_reduction must be 'mean': the loss is one"
        )
    data = [[pair] for pair in pairs(load_rollouts(args.rollouts))]
    policy = resolve(args.model)(args.seed)
    reference = DirectPreference(copy.deepcopy(policy)).requires_grad_(False).eval()
    model = DirectPreference(policy, loss_weight=settings.loss_weight)
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)
    reference.to(engine.device)
    run, target = Run(engine, args), engine.window.target
    planned = ds_parity.plan(
        drawn(data, args.seed, 0, args.steps * target),
        dp_world_size=engine.dp_world_size,
        target=target,
        max_tokens=args.max_tokens,
    )
    stream = ds_parity.micro_batches(planned, run.rank, first_window=min(engine.window.index, args.steps))
    for micro_batch in engine.passes(ds_parity.to_device(one, engine.device) for one in stream):
        loss, margins, _ = engine(**with_reference(reference, micro_batch))
        engine.record("margin", margins)
        engine.record("accuracy", (margins > 0).float())
        engine.backward(loss)
        engine.step()
        run.after_pass()
    run.end()


if __name__ == "__main__":
    launch(main, __doc__)
