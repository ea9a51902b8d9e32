"""What all ranks must have been given alike, asked before they do anything together; and ranks that raise alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from ds_parity.errors import ConfigError, RankDesyncError

# What a rank says, and where it puts things, is its own affair.
_OWN_SECTIONS: Final = frozenset(
    {"tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "comms_logger", "steps_per_print", "dump_state"}
    | {"wall_clock_breakdown", "memory_breakdown", "aio"}
)
_OWN_KEYS: Final = ("path", "dir", "file", "trace")
_SHOWN = 4
# gloo's words, and what NCCL's errors derive from, where another rank is gone or silent.
_GONE: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")

_GROUPS: dict[Any, Any] = {}  # of all ranks, by the process group that they are


@dataclass(frozen=True, slots=True)
class Asked:
    """Ranks that tell each other something.

    Attributes:
        group: process group in which all of them gather.
        members: those whose answers count, by their number in the group.
    """

    group: Any
    members: frozenset[int]

    def gather(self, value: Any) -> dict[int, Any]:
        """Return what every member has sent."""
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        with naming_lost_ranks("initialize() or passes(), where all say what they were given"):
            dist.all_gather_object(gathered, value, group=self.group)
        return {rank: theirs for rank, theirs in enumerate(gathered) if rank in self.members}


def started_together(mpu: Any) -> Asked:
    """Return all ranks, of whom those must agree that step together, as far as an mpu tells.

    They talk over gloo: before DeepSpeed builds its engine a process may not have chosen its accelerator yet. All ranks
    of the job call, alike.
    """
    world = dist.group.WORLD
    if world not in _GROUPS:
        _GROUPS[world] = dist.new_group(backend="gloo")
    group_of = getattr(mpu, "get_data_parallel_group", None)
    return Asked(_GROUPS[world], frozenset(dist.get_process_group_ranks(world if group_of is None else group_of())))


@contextmanager
def all_or_none(asked: Asked) -> Iterator[None]:
    """Let no rank go on alone: where one raises inside, it tells the others, and they raise after it.

    All ranks come here. What is inside must not wait for other ranks.

    Raises:
        RankDesyncError: on the ranks that did not raise.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    gathered = asked.gather(None if error is None else in_short(error))
    if error is not None:
        raise error
    raised_on = [f"rank {rank} raised {theirs}" for rank, theirs in gathered.items() if theirs is not None]
    if raised_on:
        raise RankDesyncError(f"this rank stops because others did: {_some(raised_on)}. Mend what they say")


@contextmanager
def telling(mpu: Any) -> Iterator[None]:
    """Tell ranks that are, or come, in `all_or_none` of a ConfigError, where there is a process group to tell it in."""
    try:
        yield
    except ConfigError as error:
        if dist.is_initialized():
            started_together(mpu).gather(in_short(error))
        raise


def agree(asked: Asked, config: Mapping[str, Any]) -> None:
    """Raise where ranks were given different configurations; what they log, and where, may differ.

    Raises:
        RankDesyncError: on every rank, with the keys that differ.
    """
    own = {path: text for path, text in _flat(config) if not _is_own(path)}
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).digest()
    # The digests are small and nearly always equal; whole configurations travel only where they are not.
    if len(set(asked.gather(digest).values())) == 1:
        return
    gathered = asked.gather(own)
    keys = sorted({path for theirs in gathered.values() for path in theirs if len(set(_of(path, gathered))) > 1})
    raise RankDesyncError(
        f"ranks differ in {_some([_differing(key, gathered) for key in keys])}. All ranks need the same configuration; "
        "look at what this rank was started with"
    )


def same(group: Any, what: str, value: int) -> None:
    """Raise where the ranks of a group have different values.

    Raises:
        RankDesyncError: on every rank, with the values.
    """
    gathered = Asked(group, frozenset(range(dist.get_world_size(group)))).gather({what: value})
    if len(set(_of(what, gathered))) > 1:
        raise RankDesyncError(
            f"ranks differ in {_differing(what, gathered)}. All ranks need the same configuration and the same "
            "arguments of passes(); look at what this rank was started with"
        )


@contextmanager
def naming_lost_ranks(where: str) -> Iterator[None]:
    """Say what a failed collective means: a rank that is gone shows first in whatever DeepSpeed waits for.

    Raises:
        RankDesyncError: in place of the RuntimeError of a collective that lost a rank.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_lost_rank(error):
            raise
        raise RankDesyncError(
            f"rank {dist.get_rank()} waited for another rank in {where}: one of them ended, hangs, or runs a different "
            f"number of passes; its own log says why. ({str(error).splitlines()[0]})"
        ) from error


def is_of_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone or silent."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _GONE)


def in_short(error: Exception) -> str:
    """Return class and message, at most 400 characters, for other ranks to say."""
    return f"{type(error).__name__}: {error}"[:400]


def _of(key: str, gathered: dict[int, dict[str, Any]]) -> list[Any]:
    return [theirs.get(key, "nothing") for theirs in gathered.values()]


def _differing(key: str, gathered: dict[int, dict[str, Any]]) -> str:
    ranks = [f"rank {rank} has {value}" for rank, value in zip(gathered, _of(key, gathered), strict=True)]
    return f"{key} ({_some(ranks)})"


def _some(texts: list[str]) -> str:
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _is_own(path: str) -> bool:
    keys = path.split(".")
    return keys[0] in _OWN_SECTIONS or keys[-1].endswith(_OWN_KEYS)


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        # An object has no text that is the same in two processes.
        yield path, json.dumps(node, default=lambda value: type(value).__name__, skipkeys=True)
