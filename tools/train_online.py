"""Reinforcement learning online, to be copied: actors sample while ranks train, and the reward rises.

    deepspeed --num_accelerators 2 tools/train_online.py
    deepspeed --num_accelerators 2 tools/train_online.py --queue redis://127.0.0.1:6379 --kl 0.02

A small transformer learns to add two numbers, on CPUs in one to two minutes: supervised until a quarter of its answers
is right, then by GRPO alone. A run that was stopped, or killed, goes on with --resume.
"""

from __future__ import annotations

import argparse
import io
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from bounded import bounded
from draw_online import of_run
from online import task
from online.account import Ledger, account
from online.actors import Actors
from online.arrivals import Arrivals, Patience, micro_batch
from online.held import hold
from online.queues import Queue, open_queue
from online.settled import Settled
from trainer import Run, configuration, launch

import ds_parity
from ds_parity.losses import GroupRelativePolicy

HERE = Path(__file__).parent
FAULTS = ("none", "mean-of-micro-batches", "last-backward-only")


def more(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this script."""
    add = parser.add_argument
    add("--queue", default="folder", help="folder: a queue that needs no server; or redis://HOST:PORT (%(default)s)")
    add("--actors", type=bounded(int, 0), default=1, help="processes that sample, started here (%(default)s)")
    add("--group", type=bounded(int, 1), default=8, help="rollouts of one prompt (%(default)s)")
    add("--batch", type=bounded(int, 1), default=16, help="prompts that an actor samples at once (%(default)s)")
    add("--micro_batch", type=bounded(int, 1), default=16, help="rollouts in a micro-batch at most (%(default)s)")
    add("--largest", type=bounded(int, 0, task.LARGEST), default=9, help="greatest number in a problem (%(default)s)")
    add(
        "--level",
        type=bounded(float, 0, 1),
        default=0.25,
        help="mean reward at which the supervised warm-up ends (%(default)s)",
    )
    add("--max_lag", type=bounded(int, 0), default=8, help="windows that a rollout may be old (%(default)s)")
    add("--old", choices=["drop", "clip"], default="drop", help="older ones: leave out, or bound their ratios")
    add("--room", type=bounded(int, 1), default=16, help="groups that may wait in the queue (%(default)s)")
    add(
        "--rest",
        type=bounded(float, 0),
        default=0.0,
        help="seconds that an actor rests behind a batch: a slower one (%(default)s)",
    )
    add(
        "--wait",
        type=bounded(float, 0),
        default=0.05,
        help="seconds until a rank without data runs an idle pass (%(default)s)",
    )
    add(
        "--patience", type=bounded(float, 0), default=60, help="seconds until a run without rollouts ends (%(default)s)"
    )
    add("--clip_low", type=float, default=0.2, help="of the ratio (%(default)s)")
    add("--clip_high", type=float, default=0.28, help="of the ratio (%(default)s)")
    add("--ratio_cap", type=float, default=4.0, help="greatest ratio with --old clip (%(default)s)")
    add("--norm", choices=["token", "rollout", "dr_grpo"], default="token", help="what the loss is a mean over")
    add("--kl", type=float, default=0.0, help="coefficient of the KL to the policy of the start (%(default)s)")
    add("--sync", action="store_true", help="sample each window with the weights that it is trained on")
    add("--record", action="store_true", help="keep what was trained on, for tools/online/replay.py")
    add("--quota", action="store_true", help="deal rollouts as PipelineRL does: the same number to each rank")
    add("--fault", choices=FAULTS, default="none", help="put a known fault in, to see what it costs")
    parser.set_defaults(output=Path("online_out"), steps=300, save_every=50)
    parser.set_defaults(deepspeed_config=str(HERE / "online" / "ds_config.json"))


def main(args: argparse.Namespace, kind: Callable[..., Online] | None = None) -> Online:
    """Train one rank; on the first one, the actors' processes are children."""
    config, loss, target = losses(args)
    deepspeed.init_distributed()
    run = named(args)
    queue = open_queue(args.queue, args.output / "queue", run)
    if args.sync and dist.get_rank() == 0:
        queue.withdraw()  # a run that goes on may have lost the weights that sample now
    # They take seconds to start, and wait for weights then.
    actors = Actors(args, run, shares(target // args.group, args)) if dist.get_rank() == 0 else None
    try:
        model = GroupRelativePolicy(started(args), **loss)
        engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)
        trained = (kind or Online)(engine, args, queue, actors)
        if args.kl:
            trained.reference = GroupRelativePolicy(started(args), **loss).requires_grad_(False).to(engine.device)
        trained.loop()
    finally:
        if actors is not None:
            actors.stop()
    trained.report()
    return trained


def losses(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the configuration, the arguments of the loss that go with it, and the rollouts of a window."""
    config, settings = configuration(args)
    if settings.target % args.group or args.micro_batch < args.group:
        raise ds_parity.ConfigError(
            f"--group {args.group}: the target of {settings.target} rollouts must be a multiple of it, and "
            f"--micro_batch {args.micro_batch} no less: groups are not split"
        )
    if settings.lookahead != 0:
        raise ds_parity.ConfigError(
            f"ds_parity.lookahead is {settings.lookahead}: leave it at 0, because a group that is read ahead would be "
            "written down as trained on before it is"
        )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # as the launcher says before the process group is there
    if args.quota and settings.target % (args.group * ranks):
        raise ds_parity.ConfigError(
            f"--quota deals the target of {settings.target} rollouts in groups of {args.group} to {ranks} ranks: it "
            "must be a multiple of their product"
        )
    if args.sync and args.actors > settings.target // args.group:
        raise ds_parity.ConfigError(
            f"--sync with {args.actors} actors, and {settings.target // args.group} groups in a window: each actor "
            "must sample one at least; start fewer actors"
        )
    unit = "token" if args.norm == "token" else "rollout"
    weight = "pass" if args.fault == "mean-of-micro-batches" else unit
    section = config["ds_parity"] | {"loss_weight": weight}
    if args.kl:
        section["terms"] = {"policy": {"weight": weight}, "kl": {"weight": weight, "coefficient": args.kl}}
        del section["loss_weight"]
    config["ds_parity"], args.trace = section, Path(section["trace"])
    bounds = {"clip_low": args.clip_low, "clip_high": args.clip_high}
    cap = {"ratio_cap": args.ratio_cap if args.old == "clip" else None}
    length = {"length": task.LONGEST if args.norm == "dr_grpo" else None}
    return config, {"loss_weight": unit} | bounds | cap | length, settings.target


def named(args: argparse.Namespace) -> str:
    """Return the name of the run, which its queue goes by; made once, on the first rank."""
    path = args.output / "run"
    if path.exists() and not args.resume:
        raise ds_parity.ConfigError(f"{args.output} holds another run: give --resume to go on with it, or another one")
    dist.barrier()
    hold(args.output)
    if dist.get_rank() == 0 and not path.exists():
        path.write_text(f"online-{uuid.uuid4().hex[:12]}")
    dist.barrier()
    return path.read_text()


def started(args: argparse.Namespace) -> torch.nn.Module:
    """Return the policy of the start; the first rank warms it up once, all ranks read it."""
    path = args.output / "start.pt"
    if dist.get_rank() == 0 and not path.exists():
        begun = time.monotonic()
        policy, steps, reached = task.warmed_up(args.seed, args.largest, args.level)
        torch.save(policy.state_dict(), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        print(f"warm-up: {steps} supervised steps, reward {reached:.3f}, {time.monotonic() - begun:.0f} s", flush=True)
    dist.barrier()
    policy = task.build(args.seed)
    policy.load_state_dict(torch.load(path, weights_only=True))
    return policy


def shares(groups: int, args: argparse.Namespace) -> list[int]:
    """Return how many groups of a window each actor samples; 0 where they go on without a pause."""
    return [(groups + place) // args.actors if args.sync else 0 for place in range(args.actors)]


class Online:
    """One rank's training: what arrives, is trained on, written down, and given to the actors.

    Args:
        engine: the rank's.
        args: of the command line.
        queue: of the run.
        actors: on the first rank, to be watched.
    """

    def __init__(
        self, engine: ds_parity.ParityEngine, args: argparse.Namespace, queue: Queue, actors: Actors | None
    ) -> None:
        self.engine, self.args, self.queue, self.actors = engine, args, queue, actors
        self.rank = dist.get_rank(engine.data_parallel_group)
        self.ledger = Ledger(args.output, self.rank, keep=args.record)
        self.settled = Settled(queue, self.ledger, self.rank)
        self.run = Run(engine, args, self.settled.state, self.settled.saved)
        own = shares(engine.window.target // args.group, args) if args.sync else None
        self.settled.resume(self.run.kept, engine.window.index, resumed=args.resume, shares=own, size=args.group)
        self.reference: GroupRelativePolicy | None = None
        quota = engine.window.target // engine.dp_world_size if args.quota else None
        self._patience = Patience(args.patience)
        known = self.settled.contained
        self.arrivals = Arrivals(queue, self.ledger, args, self.rank, engine, self._watch, quota, known)
        self.idle_seconds, self.begun, self.before = 0.0, time.monotonic(), engine.global_samples
        self._seen = self.before  # rollouts of all ranks

    def loop(self) -> None:
        """Train until the last step, or until a signal asks to stop."""
        self._publish()
        nothing = ds_parity.to_device(micro_batch([], 0), self.engine.device)
        stream = (ds_parity.to_device(one, self.engine.device) for one in self.arrivals)
        for one in self.engine.passes(stream, idle=nothing):
            begun = time.monotonic()
            self._pass(one)
            if one.idle:
                self.idle_seconds += time.monotonic() - begun
            else:
                self.ledger.passed(self.arrivals.groups)
            # What came to another rank has arrived, too.
            if self.engine.global_samples + self.engine.window.rollouts > self._seen:
                self._seen = self.engine.global_samples + self.engine.window.rollouts
                self._patience.came()
            if self.engine.window.passes == 0:
                self.closed()
            self.run.after_pass()
        self.run.end()

    def closed(self) -> None:
        """Do what is due between windows."""
        self.ledger.stepped(self.engine.window.index)
        self._publish()
        self._watch()

    def _pass(self, one: ds_parity.MicroBatch) -> None:
        policy, kl, cut = self.engine(**self._inputs(one))
        for name, values in self._metrics(one, cut).items():
            self.engine.record(name, values)
        if self.args.fault == "last-backward-only" and not self.engine.is_gradient_accumulation_boundary():
            policy = policy * 0
        self.engine.backward(policy if kl is None else {"policy": policy, "kl": kl})
        self.engine.step()

    def _inputs(self, one: ds_parity.MicroBatch) -> dict[str, Any]:
        inputs = dict(one.inputs)
        if self.reference is not None:
            with torch.no_grad():
                inputs["reference_logps"] = self.reference.logps(inputs["input_ids"])
        return inputs

    def _metrics(self, one: ds_parity.MicroBatch, cut: torch.Tensor) -> dict[str, Any]:
        if one.idle:
            return {}
        held: Iterable[Any] = one.held
        return {
            "reward": torch.tensor([rollout.reward for rollout in held]),
            "lag": torch.tensor([float(rollout.lag) for rollout in held]),
            "length": torch.tensor([float(rollout.loss_tokens) for rollout in held]),
            "clipped": cut,
        }

    def _publish(self) -> None:
        """Give the weights of the open window to the actors; collective on ZeRO 3 alone."""
        policy, sharded = self.engine.module.policy, self.engine.zero_optimization_stage() == 3
        with deepspeed.zero.GatheredParameters(list(policy.parameters()), enabled=sharded):
            if dist.get_rank() == 0:
                content = io.BytesIO()
                torch.save(policy.state_dict(), content)
                self.queue.publish(self.engine.window.index, content.getvalue())

    def _watch(self) -> None:
        self._patience.check(self.arrivals.dropped)
        if self.actors is not None:
            self.actors.check()

    def report(self) -> None:
        """Print how fast it was, how long ranks waited, and where every rollout has gone; draw the curve."""
        seconds = time.monotonic() - self.begun
        mine = (self.arrivals.waited + self.idle_seconds) / seconds
        waits: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(waits, (mine, self.arrivals.over))
        if dist.get_rank():
            return
        speed = (self.engine.global_samples - self.before) / seconds
        said = ", ".join(f"{share:.0%}" for share, _ in waits)
        print(f"{speed:.0f} rollouts/s; share of the time in which a rank had nothing to train on: {said}", flush=True)
        if self.args.old == "clip":
            print(f"{sum(over for _, over in waits)} groups were older than {self.args.max_lag} windows", flush=True)
        print(account(self.args.output, self.queue).says(), flush=True)
        drawn = of_run(self.args.trace, self.args.output)
        print(f"the curve of this run: {drawn}", flush=True)


if __name__ == "__main__":
    launch(main, __doc__, more)
