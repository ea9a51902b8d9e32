"""An actor: a process that samples groups of rollouts with the newest weights it has, and pushes them into the queue.

train_online.py starts it; on another machine, with Redis: python tools/online/actor.py --queue redis://HOST:PORT ...
It ends with its --parent, or when it is asked to.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bounded import bounded

from online import task
from online.queues import Group, Queue, QueueError, open_queue


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", default="folder", help="folder, or redis://HOST:PORT (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="of the run")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--name", required=True, help="of this actor, such as a0.1: its place, and which life it is in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", type=bounded(int, 1), default=8, help="rollouts of one prompt (%(default)s)")
    parser.add_argument("--batch", type=bounded(int, 1), default=8, help="prompts sampled at once (%(default)s)")
    parser.add_argument(
        "--largest", type=bounded(int, 0, task.LARGEST), default=9, help="greatest number in a problem (%(default)s)"
    )
    parser.add_argument(
        "--room", type=bounded(int, 1), default=64, help="groups that may wait in the queue (%(default)s)"
    )
    parser.add_argument(
        "--each", type=bounded(int, 0), default=0, help="groups of each version, 0: as many as there is room for"
    )
    parser.add_argument(
        "--rest", type=bounded(float, 0), default=0.0, help="seconds between batches, as a slower policy would take"
    )
    # Given, and not asked for here: whoever starts this may be gone before it runs.
    parser.add_argument("--parent", type=int, help="process to end with (default: with none)")
    return parser.parse_args()


class Actor:
    """Samples, and numbers what it has pushed.

    Args:
        args: of the command line.
        queue: to push into.
    """

    def __init__(self, args: argparse.Namespace, queue: Queue) -> None:
        self.args, self.queue = args, queue
        self.version, self.number = -1, 0
        self.model = task.build(args.seed)
        self._numbers = random.Random(f"{args.seed}/{args.name}")
        self._generator = torch.Generator().manual_seed(self._numbers.getrandbits(62))
        folder = args.output / "actors"
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / f"{args.name}.log").open("a")
        self._made = 0  # groups of the version that it has

    def run(self) -> None:
        """Sample until the process that started this one is gone."""
        while self.args.parent in (None, os.getppid()):
            self._take_weights()
            prompts = self._wanted()
            if not prompts:
                time.sleep(0.005)
                continue
            for group in self._groups(prompts):
                self._push(group)
            time.sleep(self.args.rest)

    def _take_weights(self) -> None:
        # Again where others came while it was counted: what was counted may have been settled by then.
        while (newest := self.queue.newest(self.version)) is not None:
            goes_on = 0 <= self.version == newest[0] - 1
            self.version = newest[0]
            self.model.load_state_dict(torch.load(io.BytesIO(newest[1]), weights_only=True))
            self._made = 0 if goes_on or not self.args.each else self._of_earlier_lives()

    def _of_earlier_lives(self) -> int:
        """How many groups of the version there are already: an actor was killed, or the run goes on from here."""
        return self.queue.versions(self.args.name.split(".")[0]).count(self.version)

    def _wanted(self) -> int:
        """How many groups to sample now: none without weights, or without room in the queue."""
        if self.version < 0:
            return 0
        if self.args.each:
            return max(0, min(self.args.batch, self.args.each - self._made))
        return self.args.batch if len(self.queue.waiting()) < self.args.room else 0

    def _groups(self, prompts: int) -> list[Group]:
        asked = [task.problem(self._numbers, self.args.largest) for _ in range(prompts)]
        size = self.args.group
        answers, logps = task.generate(self.model, [one for one in asked for _ in range(size)], self._generator)
        groups = []
        for place, prompt in enumerate(asked):
            own = slice(place * size, (place + 1) * size)
            groups.append(
                {
                    "id": f"{self.args.name}-{self.number + place}",
                    "version": self.version,
                    "prompt": prompt,
                    "answers": answers[own],
                    "logps": logps[own],
                    "rewards": [task.reward(prompt, task.decoded(answer)) for answer in answers[own]],
                }
            )
        return groups

    def _push(self, group: Group) -> None:
        self.queue.push(group)
        # Behind the push: what is written here has been in the queue, and must be found again.
        print(self.number, self.version, file=self._log, flush=True)
        self.number += 1
        self._made += 1


def main() -> int:
    """Run an actor; 3 where the queue can't be used."""
    torch.set_num_threads(1)
    args = arguments()
    try:
        Actor(args, open_queue(args.queue, args.output / "queue", args.run)).run()
    except (QueueError, OSError) as error:
        print(f"actor {args.name}: {error}", file=sys.stderr, flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
