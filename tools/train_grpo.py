"""GRPO on recorded rollouts, to be copied: steps by rollouts, planned micro-batches, checkpoints, a clean stop.

    deepspeed --num_accelerators 2 tools/train_grpo.py --deepspeed_config ds_configs/zero2_bf16.json

A run that was stopped, or killed, goes on with --resume, and leaves the trace of one that never was.
"""

from __future__ import annotations

import argparse
from itertools import groupby

import torch
from trainer import Run, configuration, drawn, launch

import ds_parity
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.rollouts import load_rollouts
from ds_parity.parity.running.functions import resolve

STEPS_A_ROUND = 8


def main(args: argparse.Namespace) -> None:
    """Train one rank."""
    config, settings = configuration(args)
    prompts = [list(group) for _, group in groupby(load_rollouts(args.rollouts), key=lambda one: one.prompt_id)]
    model = PolicyGradient(resolve(args.model)(args.seed), settings.loss_weight, settings.loss_reduction)
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)
    run, target = Run(engine, args), engine.window.target
    while engine.window.index < args.steps and not engine.stopping:
        # A round: rollouts are sampled from the policy as it stands, then trained on. A sampler goes in place of
        # `drawn`; it must keep the rollouts of a round until the round has ended, for a run that is resumed inside it.
        number, done = divmod(engine.window.index, STEPS_A_ROUND)
        steps = min(STEPS_A_ROUND, args.steps - number * STEPS_A_ROUND)
        rollouts = drawn(prompts, args.seed, number * STEPS_A_ROUND * target, steps * target)
        planned = ds_parity.plan(
            rollouts, dp_world_size=engine.dp_world_size, target=target, max_tokens=args.max_tokens
        )
        stream = ds_parity.micro_batches(planned, run.rank, first_window=done)
        for micro_batch in engine.passes(ds_parity.to_device(one, engine.device) for one in stream):
            engine.record("reward", torch.tensor([rollout.reward for rollout in micro_batch.held]))
            engine.backward(engine(**micro_batch.inputs))
            engine.step()
            run.after_pass()
    run.end()


if __name__ == "__main__":
    launch(main, __doc__)
