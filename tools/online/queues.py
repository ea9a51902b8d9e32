"""The queue between actors and ranks: a folder on a disk that all of them see, or Redis.

Both keep the same promises. A group of rollouts is *waiting* until one rank claims it, which is one indivisible act;
then it is *claimed* by that rank until it is settled (a checkpoint contains its step, or it was dropped) or given back.
So whoever is killed, wherever it is, a group is in one place, and it is known in which.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import ds_parity

Group = dict[str, Any]
"""One prompt and its rollouts, as an actor made it; `id` names it."""


class QueueError(ds_parity.DsParityError):
    """The queue can't be used: the server is gone, the disk is full, or the client is not installed."""


class Queue(Protocol):
    """What actors and ranks do with a queue."""

    def push(self, group: Group) -> None:
        """Add a group; it is there as a whole or not at all."""

    def claim(self, rank: int) -> Group | None:
        """Take the oldest waiting group for a rank; None where none waits."""

    def settle(self, rank: int, ids: Iterable[str]) -> None:
        """Forget groups that a rank has claimed."""

    def give_back(self, rank: int, ids: Iterable[str]) -> None:
        """Have groups that a rank has claimed wait again."""

    def waiting(self) -> list[str]:
        """Return the ids of the groups that wait, the oldest first."""

    def claimed(self) -> dict[str, int]:
        """Return the ids of the claimed groups, and who has claimed them."""

    def versions(self, place: str) -> list[int]:
        """Return which weights have sampled each group that waits or is claimed, of the actors of a place."""

    def publish(self, version: int, weights: bytes) -> None:
        """Give weights to the actors, in place of those before."""

    def withdraw(self) -> None:
        """Take the weights away; actors that have none wait for the next."""

    def newest(self, after: int) -> tuple[int, bytes] | None:
        """Return the weights and their version, None where that is `after`."""


def open_queue(url: str, folder: Path, run: str) -> Queue:
    """Return a queue.

    Args:
        url: `redis://HOST:PORT`, or `folder`: the default, between processes that see one disk.
        folder: where the latter lies.
        run: the name of the run, under which Redis keeps its queue.

    Raises:
        QueueError: it is neither, or Redis does not answer.
    """
    if url == "folder":
        return Folder(folder)
    if url.startswith(("redis://", "rediss://", "unix://")):
        return Redis(url, run)
    raise QueueError(f"--queue {url!r}: must be redis://HOST:PORT, or folder")


class Folder:
    """A file for each group: renaming it moves it from one place to the next, which is indivisible.

    Args:
        folder: on a file system that all processes see.
    """

    def __init__(self, folder: Path) -> None:
        self._waiting, self._claimed, self._weights = folder / "waiting", folder / "claimed", folder / "weights"
        for place in (self._waiting, self._claimed):
            place.mkdir(parents=True, exist_ok=True)
        self._seen: deque[str] = deque()
        self._files: dict[str, Path] = {}

    def push(self, group: Group) -> None:
        """Write the file beside its place, then move it there."""
        self._write(self._waiting / f"{time.time_ns():020d}~{group['id']}.json", json.dumps(group).encode())

    def claim(self, rank: int) -> Group | None:
        """Move the oldest file to this rank's; where another rank was quicker, the next one."""
        if not self._seen:
            self._seen.extend(self._names(self._waiting))
        while self._seen:
            name = self._seen.popleft()
            own = self._of(rank) / name
            try:
                (self._waiting / name).rename(own)
            except FileNotFoundError:
                continue
            return self._read(own)
        return None

    def _read(self, own: Path) -> Group:
        try:
            group: Group = json.loads(own.read_bytes())
            self._files[group["id"]] = own
        except (ValueError, TypeError, KeyError) as error:
            raise QueueError(
                f"{own} is no whole group ({type(error).__name__}: {error}): whoever wrote it must write it beside its "
                "place, and rename it; take the file away, and go on with --resume"
            ) from error
        return group

    def settle(self, rank: int, ids: Iterable[str]) -> None:
        """Delete the files."""
        for one in ids:
            self._file(rank, one).unlink()
            del self._files[one]

    def give_back(self, rank: int, ids: Iterable[str]) -> None:
        """Move the files to where they were; their names keep their age."""
        for one in ids:
            path = self._file(rank, one)
            path.rename(self._waiting / path.name)
            del self._files[one]

    def waiting(self) -> list[str]:
        """Read the names of the files."""
        return [_id_in(name) for name in self._names(self._waiting)]

    def claimed(self) -> dict[str, int]:
        """Read the names of the files."""
        ranks = [int(path.name) for path in self._claimed.iterdir()]
        return {_id_in(name): rank for rank in ranks for name in self._names(self._of(rank))}

    def versions(self, place: str) -> list[int]:
        """Read the files; those that wait first, because they move on meanwhile."""
        found: dict[str, int] = {}
        own = f"[!.]*~{glob.escape(place)}.*.json"
        for path in chain(self._waiting.glob(own), self._claimed.glob(f"*/{own}")):
            # Settled meanwhile, or no whole group, which the rank that claims it says.
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                found[path.name] = int(json.loads(path.read_bytes())["version"])
        return list(found.values())

    def publish(self, version: int, weights: bytes) -> None:
        """Write a file in place of the one before, its version first."""
        self._write(self._weights, version.to_bytes(8, "big") + weights)

    def withdraw(self) -> None:
        """Delete the file."""
        self._weights.unlink(missing_ok=True)

    def newest(self, after: int) -> tuple[int, bytes] | None:
        """Read the file, as far as its version where nothing is new."""
        try:
            with self._weights.open("rb") as file:
                version = int.from_bytes(file.read(8), "big")
                return None if version == after else (version, file.read())
        except FileNotFoundError:
            return None

    def _write(self, path: Path, content: bytes) -> None:
        # A process that is killed leaves the hidden file, which nobody reads.
        hidden = path.with_name(f".{os.getpid()}~{path.name}")
        try:
            hidden.write_bytes(content)
            hidden.replace(path)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            raise QueueError(f"{path.parent}: {error.strerror} (queue in a folder)") from error

    def _names(self, place: Path) -> list[str]:
        return sorted(name for name in os.listdir(place) if not name.startswith("."))  # noqa: PTH208 (names alone)

    def _of(self, rank: int) -> Path:
        place = self._claimed / str(rank)
        place.mkdir(exist_ok=True)
        return place

    def _file(self, rank: int, one: str) -> Path:
        if one not in self._files:
            self._files |= {_id_in(name): self._of(rank) / name for name in self._names(self._of(rank))}
        return self._files[one]


class Redis:
    """Two lists of ids, waiting and claimed, and the groups themselves by their ids.

    What takes several commands is one transaction (MULTI), so that Redis does all of it or nothing. Whether it survives
    a kill of the server is the server's configuration: `appendonly yes` keeps all but the last second.

    Args:
        url: of the server.
        run: the name of the run, which all its keys begin with.
    """

    def __init__(self, url: str, run: str) -> None:
        try:
            import redis  # comes with the extra `online`
            import redis.backoff
            import redis.retry
        except ImportError as error:
            raise QueueError(f"--queue {url}: the client is not installed: pip install 'ds_parity[online]'") from error
        self._url, self._lost = url, redis.exceptions.RedisError
        # The client would try again by itself, and a push whose answer was lost would be there twice.
        once = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        self._server = redis.Redis.from_url(url, socket_timeout=10, socket_connect_timeout=5, retry=once)
        self._items, self._waiting, self._run = f"{run}:groups", f"{run}:waiting", run
        self._tell("PING")

    def push(self, group: Group) -> None:
        """Keep the group, and put its id at the end of the list."""
        text = json.dumps(group)
        self._together(("HSET", self._items, group["id"], text), ("RPUSH", self._waiting, group["id"]))

    def claim(self, rank: int) -> Group | None:
        """Move an id from one list to the other."""
        one = self._tell("LMOVE", self._waiting, self._of(rank), "LEFT", "RIGHT")
        if one is None:
            return None
        group: Group = json.loads(self._tell("HGET", self._items, one))
        return group

    def settle(self, rank: int, ids: Iterable[str]) -> None:
        """Delete the ids and the groups."""
        commands = [[("LREM", self._of(rank), 1, one), ("HDEL", self._items, one)] for one in ids]
        if commands:
            self._together(*(command for pair in commands for command in pair))

    def give_back(self, rank: int, ids: Iterable[str]) -> None:
        """Put the ids at the head of the list."""
        commands = [[("LREM", self._of(rank), 1, one), ("LPUSH", self._waiting, one)] for one in reversed(list(ids))]
        if commands:
            self._together(*(command for pair in commands for command in pair))

    def waiting(self) -> list[str]:
        """Read the list."""
        return [one.decode() for one in self._tell("LRANGE", self._waiting, 0, -1)]

    def claimed(self) -> dict[str, int]:
        """Read the lists of all ranks."""
        keys = [key.decode() for key in self._tell("KEYS", f"{self._run}:claimed:*")]
        ranks = [int(key.rsplit(":", 1)[1]) for key in keys]
        return {one.decode(): rank for rank in ranks for one in self._tell("LRANGE", self._of(rank), 0, -1)}

    def versions(self, place: str) -> list[int]:
        """Read the groups of all ids in the lists."""
        # Once each: a rank may claim one between both.
        ids = [one for one in {*self.waiting(), *self.claimed()} if one.startswith(f"{place}.")]
        groups = self._tell("HMGET", self._items, *ids) if ids else []
        return [int(json.loads(group)["version"]) for group in groups if group is not None]

    def publish(self, version: int, weights: bytes) -> None:
        """Keep both in one field, so that none is read with another's version."""
        self._tell("SET", f"{self._run}:weights", version.to_bytes(8, "big") + weights)

    def withdraw(self) -> None:
        """Delete the field."""
        self._tell("DEL", f"{self._run}:weights")

    def newest(self, after: int) -> tuple[int, bytes] | None:
        """Read the first bytes, and the rest where they are new."""
        head = self._tell("GETRANGE", f"{self._run}:weights", 0, 7)
        if not head or int.from_bytes(head, "big") == after:
            return None
        whole = self._tell("GET", f"{self._run}:weights")
        return int.from_bytes(whole[:8], "big"), whole[8:]

    def _of(self, rank: int) -> str:
        return f"{self._run}:claimed:{rank}"

    def _tell(self, *command: Any) -> Any:
        try:
            return self._server.execute_command(*command)
        except self._lost as error:
            raise self._gone(error) from error

    def _together(self, *commands: tuple[Any, ...]) -> None:
        try:
            with self._server.pipeline(transaction=True) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                pipe.execute()
        except self._lost as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> QueueError:
        return QueueError(
            f"{self._url} does not answer as it should: {error}; start the server again and go on with --resume: what "
            "it has not kept is named then"
        )


def _id_in(name: str) -> str:
    return name.split("~", 1)[1].removesuffix(".json")
