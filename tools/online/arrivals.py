"""What has arrived for a rank, as the stream of micro-batches that `engine.passes` reads."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import ds_parity
from online import task
from online.account import Ledger
from online.queues import Group, Queue, QueueError


@dataclass(frozen=True, slots=True)
class Sampled(ds_parity.Rollout):
    """A rollout, with what the policy that sampled it gave its tokens.

    Attributes:
        logps: of the completion's tokens, in nats.
        lag: windows between the weights that sampled it and those that it is trained on.
    """

    logps: tuple[float, ...] = ()
    lag: int = 0


class Arrivals:
    """Claims groups from the queue when the engine asks for a micro-batch.

    A micro-batch contains what has arrived, up to `--micro_batch` rollouts. Where nothing has come within `--wait`
    seconds it is empty: the rank runs an idle pass, and the other ranks go on.

    Args:
        queue: to claim from.
        ledger: of this rank.
        args: of the command line.
        rank: of the data-parallel group.
        engine: whose window says how old a rollout is.
        watch: called while this rank waits.
        quota: rollouts that this rank may take in one window, None: as many as there are. May be changed on the way.
        contained: ids that are in the weights: a Redis that was killed may have forgotten that they were claimed.

    Attributes:
        dropped: groups that were left out because of their lag.
        waited: seconds in which this rank had nothing to run.
        over: groups whose lag was above the bound and that were trained on.
    """

    def __init__(
        self,
        queue: Queue,
        ledger: Ledger,
        args: argparse.Namespace,
        rank: int,
        engine: Any,
        watch: Callable[[], None] = lambda: None,
        quota: int | None = None,
        contained: Container[str] = (),
    ) -> None:
        self._queue, self._ledger, self._args, self._rank, self._engine = queue, ledger, args, rank, engine
        self._watch, self.quota, self._contained = watch, quota, contained
        self._taken, self._of_window = 0, -1
        self.groups: list[Group] = []
        self.waited = 0.0
        self.over, self.dropped = 0, 0
        self._oldest = 0 if args.sync else args.max_lag

    def __iter__(self) -> Iterator[ds_parity.MicroBatch]:
        while self._engine.window.index < self._args.steps:
            self.groups = self._claimed()
            yield micro_batch(self.groups, self._engine.window.index) if self.groups else ds_parity.MicroBatch({}, 0)

    def _claimed(self) -> list[Group]:
        window, begun = self._engine.window, time.monotonic()
        if window.index != self._of_window:
            self._taken, self._of_window = 0, window.index
        left = self._args.micro_batch if self.quota is None else min(self._args.micro_batch, self.quota - self._taken)
        groups: list[Group] = []
        if left < self._args.group:  # it has its share, and others may wait for an actor that is gone
            self._watch()
        while len(groups) < left // self._args.group:
            group = self._queue.claim(self._rank)
            if group is None:
                if groups or time.monotonic() - begun > self._args.wait:
                    break
                self._watch()
                time.sleep(0.002)
            elif group["id"] in self._contained:
                self._queue.settle(self._rank, [group["id"]])
            elif self._young(group):
                groups.append(group)
        if not groups:
            self.waited += time.monotonic() - begun
        self._taken += len(groups) * self._args.group
        return groups

    def _young(self, group: Group) -> bool:
        lag = lag_of(group, self._engine.window.index)
        if lag <= self._oldest:
            return True
        if self._args.old == "clip" and not self._args.sync:
            self.over += 1
            return True
        self._ledger.dropped(group, lag)
        self._queue.settle(self._rank, [group["id"]])
        self.dropped += 1
        return False


class Patience:
    """Ends a run in which nothing arrives.

    Args:
        seconds: how long to wait.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since = seconds, time.monotonic()

    def came(self) -> None:
        """Note that something has arrived."""
        self._since = time.monotonic()

    def check(self, dropped: int) -> None:
        """Raise where nothing has arrived for too long.

        Args:
            dropped: groups that were left out because of their lag.

        Raises:
            QueueError: so it is.
        """
        if time.monotonic() - self._since > self._seconds:
            raise QueueError(
                f"no rollout has arrived for {self._seconds:g} s: look for messages of the actors"
                + (f"; {dropped} groups were dropped: their lag was above --max_lag (0 with --sync)" if dropped else "")
            )


def lag_of(group: Group, window: int) -> int:
    """Return the distance of a group's weights from the window, in windows.

    After --resume a group may come from weights that are lost, and newer than those that the run goes on with.
    """
    return abs(window - int(group["version"]))


def micro_batch(groups: Sequence[Group], window: int) -> ds_parity.MicroBatch:
    """Return the micro-batch of some groups, with `sampled_logps` (B, T - 1) among its inputs; may be empty."""
    held = [rollout for group in groups for rollout in rollouts_of(group, window)]
    batch = ds_parity.collate(held, prompts=len(groups))
    logps = torch.zeros_like(batch.inputs["loss_mask"])
    for row, rollout in enumerate(held):
        logps[row, rollout.prompt_length - 1 : len(rollout.tokens) - 1] = torch.tensor(rollout.logps)
    return replace(batch, inputs={**batch.inputs, "sampled_logps": logps})


def rollouts_of(group: Group, window: int) -> list[Sampled]:
    """Return the rollouts of a group, their advantages among each other."""
    asked, rewards = task.encoded(group["prompt"]), group["rewards"]
    advantages = ds_parity.group_advantages([group["id"]] * len(rewards), rewards)
    return [
        Sampled(group["id"], (*asked, *answer), len(asked), one, advantage, None, tuple(logps), lag_of(group, window))
        for answer, logps, one, advantage in zip(group["answers"], group["logps"], rewards, advantages, strict=True)
    ]
