"""The actors of a run, started and watched by the first rank."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from online.queues import QueueError

MOST_LIVES = 20
"""How often the actor of one place is started again."""


class Actors:
    """Starts actors, and starts one again that was killed.

    Args:
        args: of the command line.
        run: the name of the run.
        each: groups that each actor samples of every version; 0: as many as there is room for.
    """

    def __init__(self, args: argparse.Namespace, run: str, each: list[int]) -> None:
        self._args, self._run, self._each = args, run, each
        self._lives = [self._last_life(place) for place in range(args.actors)]
        self._first = list(self._lives)
        self._processes = [self._start(place) for place in range(args.actors)]

    def check(self) -> None:
        """Start again what was killed, and say so.

        Raises:
            QueueError: an actor has given up, or was killed too often.
        """
        for place, process in enumerate(self._processes):
            code = process.poll()
            if code is None:
                continue
            if code >= 0:
                raise QueueError(f"actor a{place}.{self._lives[place]} has ended with code {code}: see its message")
            if self._lives[place] - self._first[place] > MOST_LIVES:
                raise QueueError(f"actor a{place} was killed {MOST_LIVES} times: the machine may be out of memory")
            killed = f"actor a{place}.{self._lives[place]} was ended by {signal.Signals(-code).name}"
            self._processes[place] = self._start(place)
            print(f"{killed}; a{place}.{self._lives[place]} takes its place", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End all of them; what they have not pushed was never produced."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()

    def _last_life(self, place: int) -> int:
        # Not how many logs there are: an actor that was killed before it opened its log has left none.
        logs = (self._args.output / "actors").glob(f"a{place}.*.log")
        return max((int(path.name.split(".")[1]) for path in logs), default=0)

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        self._lives[place] += 1
        args = self._args
        given = {
            "queue": args.queue,
            "output": args.output,
            "run": self._run,
            "name": f"a{place}.{self._lives[place]}",
            "seed": args.seed,
            "group": args.group,
            "batch": args.batch,
            "largest": args.largest,
            "room": args.room,
            "rest": args.rest,
            "each": self._each[place],
            "parent": os.getpid(),
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        script = Path(__file__).with_name("actor.py")
        # In a session of its own, so that Ctrl-C on a terminal asks the ranks alone: they end the actors.
        return subprocess.Popen([sys.executable, str(script), *words], env=environment, start_new_session=True)
