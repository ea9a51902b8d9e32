"""The account of a run: where each group of rollouts that was ever produced has gone.

    python tools/online/account.py --output online_out

Actors write down what they have pushed, ranks what they have stepped and dropped, and the queue knows what waits and
what is claimed. An account is made of these, so it can be made of a run that was killed, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

from online.queues import Group, Queue, QueueError, open_queue


class Ledger:
    """What one rank has stepped and dropped, written window by window.

    Args:
        output: folder of the run.
        rank: this one.
        keep: whether whole rollouts are kept, for a replay.
    """

    def __init__(self, output: Path, rank: int, *, keep: bool = False) -> None:
        self._output = output
        self._file = self._opened(output / "ledger", rank)
        self._kept = self._opened(output / "consumed", rank) if keep else None
        self._open: list[Group] = []
        self.unsettled: list[str] = []
        """Stepped since the last checkpoint."""

    def passed(self, groups: Iterable[Group]) -> None:
        """Take in what a pass has trained on."""
        self._open.extend(groups)

    def stepped(self, step: int) -> None:
        """Write down the window that has ended with this step."""
        ids = [group["id"] for group in self._open]
        if self._kept is not None:
            self._write(self._kept, {"step": step, "groups": self._open})
        self._write(self._file, {"step": step, "stepped": ids})
        self.unsettled += ids
        self._open = []

    def dropped(self, group: Group, lag: int) -> None:
        """Write down that a group was left out because of its lag, in windows."""
        self._write(self._file, {"dropped": group["id"], "lag": lag})

    def resumed(self, step: int) -> None:
        """Write down that the run goes on behind this step: steps after it are not in the weights."""
        for file in filter(None, (self._file, self._kept)):
            self._write(file, {"resumed": step})

    def resumed_with(self, ranks: int, step: int) -> None:
        """Write down the same for the ranks of earlier that a run with so many has not."""
        for path in (*self._output.glob("ledger/rank*.jsonl"), *self._output.glob("consumed/rank*.jsonl")):
            rank = int(path.stem.removeprefix("rank"))
            if rank >= ranks:
                with self._opened(path.parent, rank) as file:
                    self._write(file, {"resumed": step})

    @staticmethod
    def _opened(folder: Path, rank: int) -> TextIO:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{rank}.jsonl"
        cut_off = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
        file = path.open("a")
        if cut_off:  # the line during which the rank was killed
            file.write("\n")
        return file

    @staticmethod
    def _write(file: TextIO, line: dict[str, Any]) -> None:
        try:
            print(json.dumps(line), file=file, flush=True)
        except OSError as error:
            raise QueueError(f"{file.name}: {error.strerror}; the account can't go on without it") from error


@dataclass
class Account:
    """Groups by what has become of them.

    Attributes:
        steps: step by step, the ids that are in the weights.
        dropped: left out because of their lag.
        waiting: in the queue.
        claimed: a rank has taken them, and they are in no step; --resume gives them back.
        lost: an actor has pushed them, and they are nowhere.
        twice: in more than one step.
        again: in a step, and waiting in the queue, from where they would be trained on once more.
    """

    steps: dict[int, list[str]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    claimed: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    twice: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)

    @property
    def stepped(self) -> set[str]:
        """Ids that are in the weights."""
        return {one for ids in self.steps.values() for one in ids}

    @property
    def produced(self) -> int:
        """How many groups were ever produced."""
        return len(self.stepped | self.dropped | self.waiting | self.claimed | self.lost)

    def says(self) -> str:
        """One line."""
        return (
            f"account: {self.produced} groups produced: {len(self.stepped)} stepped in {len(self.steps)} windows, "
            f"{len(self.dropped)} dropped by their lag, {len(self.waiting)} waiting, {len(self.claimed)} claimed and "
            f"not stepped, {len(self.lost)} lost, {len(self.twice)} stepped twice"
            + (f", {len(self.again)} stepped and waiting again" if self.again else "")
        )


def account(output: Path, queue: Queue | None) -> Account:
    """Return the account of a run.

    Args:
        output: folder of the run.
        queue: of the run; None: it is gone, with what waited and was claimed.
    """
    found = Account()
    times: Counter[str] = Counter()
    for path in sorted((output / "ledger").glob("rank*.jsonl")):
        steps, dropped = ledger_of(path)
        found.dropped |= dropped
        for step, ids in steps.items():
            found.steps.setdefault(step, []).extend(ids)
            times.update(ids)
    found.twice = {one for one, count in times.items() if count > 1}
    stepped = found.stepped
    if queue is not None:
        waiting = set(queue.waiting())
        found.waiting, found.again = waiting - stepped, waiting & stepped
        found.claimed = set(queue.claimed()) - stepped  # what was stepped stays claimed until a checkpoint contains it
    # Only where it did not come back: a resumed run has older weights, for which it may be young enough.
    found.dropped -= stepped | found.waiting | found.claimed
    known = stepped | found.dropped | found.waiting | found.claimed
    found.lost = set(pushed(output / "actors")) - known | gaps(known)
    return found


def ledger_of(path: Path, key: str = "stepped") -> tuple[dict[int, list[Any]], set[str]]:
    """Return what a rank's file says: step by step what is in the weights, and the ids that were dropped."""
    steps: dict[int, list[Any]] = {}
    dropped = set()
    for line in _lines(path):
        if "resumed" in line:
            steps = {step: ids for step, ids in steps.items() if step <= line["resumed"]}
        elif "dropped" in line:
            dropped.add(line["dropped"])
        else:
            steps[line["step"]] = line[key]
    return steps, dropped


def pushed(folder: Path) -> Iterator[str]:
    """Yield the id of each group that actors say they have pushed."""
    for path in sorted(folder.glob("*.log")):
        # An actor numbers its groups from 0 on, and writes behind its push: of a line that was cut, too.
        yield from (f"{path.stem}-{number}" for number in range(len(path.read_text().splitlines())))


def gaps(known: Iterable[str]) -> set[str]:
    """Return the ids that must have been: actors number their groups without gaps."""
    by_actor: dict[str, set[int]] = {}
    for one in known:
        actor, number = one.rsplit("-", 1)
        by_actor.setdefault(actor, set()).add(int(number))
    return {f"{actor}-{n}" for actor, own in by_actor.items() for n in set(range(max(own))) - own}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the line during which its rank was killed
            continue


def main() -> int:
    """Print the account; 1 where something was lost, or is or would be stepped twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("online_out"), help="folder of the run (%(default)s)")
    parser.add_argument("--queue", default="folder", help="as in the run (%(default)s)")
    args = parser.parse_args()
    run = args.output / "run"
    if not run.is_file():
        print(f"{args.output} holds no run (it has no file 'run'): give --output the folder of one", file=sys.stderr)
        return 2
    try:
        queue = open_queue(args.queue, args.output / "queue", run.read_text())
    except QueueError as error:
        print(error, file=sys.stderr)
        queue = None
    found = account(args.output, queue)
    print(found.says())
    for what in ("lost", "twice", "again"):
        if getattr(found, what):
            print(f"{what}: {', '.join(sorted(getattr(found, what)))}")
    return int(bool(found.lost or found.twice or found.again))


if __name__ == "__main__":
    sys.exit(main())
