"""Online training that changes its rule every few windows: what has arrived, or a quota for each rank."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist
import train_online
from trainer import arguments


class Alternating(train_online.Online):
    """Deals rollouts by one rule in a block of windows, and by the other in the next.

    Attributes:
        blocks: block by block whether by quota, seconds, rollouts, and seconds without anything to train on.
    """

    def __init__(self, engine, args, queue, actors, block):
        super().__init__(engine, args, queue, actors)
        self._quota, self._block, self.blocks = engine.window.target // engine.dp_world_size, block, []
        self._note()

    def closed(self):
        super().closed()
        if self.engine.window.index % self._block:
            return
        begun, rollouts, waited = self._since
        self._note()
        now = (self._since[0] - begun, self._since[1] - rollouts, self._since[2] - waited)
        self.blocks.append([self.arrivals.quota is not None, *now])
        self.arrivals.quota = self._quota if self.arrivals.quota is None else None

    def _note(self):
        waited = self.arrivals.waited + self.idle_seconds
        self._since = time.monotonic(), self.engine.global_samples, waited


def measure(folder, blocks, block, rest=0.0):
    """Train for so many blocks of so many windows; returns the blocks of all ranks. `rest`: of a slow actor."""
    own = ["--local_rank", os.environ["LOCAL_RANK"], "--output", str(Path(folder) / "out")]
    sys.argv = ["train_online.py", *own, "--steps", str(blocks * block), "--rest", str(rest)]
    args = arguments("", train_online.more)
    trained = train_online.main(args, partial(Alternating, block=block))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, trained.blocks)
    trained.engine.destroy()
    return gathered
