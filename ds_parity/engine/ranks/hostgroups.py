"""The gloo groups in which ranks talk on the host: one of all ranks, and others only where fewer step together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist

from ds_parity.engine.ranks.ending import rest_at_exit
from ds_parity.engine.ranks.hostsum import HostSum, is_lost
from ds_parity.engine.ranks.wire import Place
from ds_parity.errors import ConfigError, RankDesyncError

INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_LAZY: Final = "TORCH_GLOO_LAZY_INIT"
_GROUPS: dict[tuple[Any, tuple[int, ...]], Any] = {}  # by the process group of all ranks, and those that it connects
_OF_SAME: dict[tuple[Any, tuple[int, ...]], Any] = {}  # likewise


def everybody() -> Any:
    """Return a gloo group of all ranks; all ranks of the job call, alike.

    Raises:
        ConfigError: this host has no interface for it.
    """
    members = tuple(range(dist.get_world_size()))
    known = _GROUPS.get((dist.group.WORLD, members))
    # The store tells all ranks alike, also one that was not there when another was lost.
    return _made(members) if known is None or is_lost(known) else known


def group_of(members_of: Any) -> Any:
    """Return a gloo group over the ranks of `members_of`; all ranks of the job call, alike.

    Args:
        members_of: a process group of this rank: that of all ranks, or one of several that divide them up.

    Raises:
        ConfigError: this host has no interface for it.
    """
    return group_among(dist.get_process_group_ranks(members_of))


def group_among(ranks: Iterable[int]) -> Any:
    """Return a gloo group over some ranks, this one among them, as `group_of` does; all ranks of the job call, alike.

    Raises:
        ConfigError: this host has no interface for it.
    """
    own = tuple(sorted(ranks))
    together = everybody()
    if len(own) == dist.get_world_size():
        return together
    known = _GROUPS.get((dist.group.WORLD, own))
    usable = known is not None and not is_lost(known)
    gathered = HostSum(together).gather((own, usable), Place("makes groups of ranks that step together"))
    # Making a group is collective over the whole job, so every rank makes the groups of all, in one order.
    for members in sorted({members for members, usable in gathered if not usable}):
        _made(members)
    return _GROUPS[dist.group.WORLD, own]


def group_of_same(what: tuple[Any, ...]) -> Any:
    """Return a process group, of the job's own backend, of all ranks that give the same; all ranks of the job call."""
    gathered = HostSum(everybody()).gather(what, Place("makes groups of ranks that read different micro-batches"))
    own: Any = None
    for its in sorted(set(gathered)):
        key = (dist.group.WORLD, tuple(rank for rank, given in enumerate(gathered) if given == its))
        # Making a group is collective over the whole job, so every rank makes the groups of all, in one order.
        if key not in _OF_SAME:
            _OF_SAME[key] = dist.new_group(list(key[1]))
        own = _OF_SAME[key] if its == what else own
    return own


def group_joining(peers: Sequence[int], members_of: Any) -> Any:
    """Return a process group of all ranks in the groups of all peers; all ranks of the job call, alike.

    Args:
        peers: ranks, this one among them; alike on each of them.
        members_of: a process group of this rank, one of several that divide the ranks up.
    """
    own = tuple(dist.get_process_group_ranks(members_of))
    gathered = HostSum(everybody()).gather(own, Place("joins the groups of ranks that share a micro-batch"))
    joined = tuple(sorted({rank for peer in peers for rank in gathered[peer]}))
    return dist.group.WORLD if len(joined) == dist.get_world_size() else group_of_same(("joined", *joined))


def _made(members: tuple[int, ...]) -> Any:
    with _connected_when_needed(), _naming_the_interface():
        group = dist.new_group(list(members), backend="gloo")
    rest_at_exit()
    _GROUPS[dist.group.WORLD, members] = group
    return group


@contextmanager
def _connected_when_needed() -> Iterator[None]:
    """Let groups that are made inside connect two ranks when they first talk: log2(ranks) connections, not all.

    torch reads the variable where it makes a group (ProcessGroupGloo.cpp), and only there; other groups of the process
    are made as its environment says.
    """
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


@contextmanager
def _naming_the_interface() -> Iterator[None]:
    try:
        yield
    except dist.DistStoreError as error:
        raise RankDesyncError(
            f"another rank did not come to connect over gloo ({str(error).splitlines()[0]}): its own log says why. If "
            f"all run, {way_out()}"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"ranks can't be connected over gloo ({str(error).splitlines()[0]}). ds_parity exchanges counts over gloo "
            f"on the host, beside NCCL too. {way_out()}"
        ) from error


def way_out() -> str:
    """Return what to set where hosts don't reach each other over gloo, and what it stands at on this one."""
    name, named = socket.gethostname(), os.environ.get(INTERFACE)
    try:
        address = f"{name!r} is {socket.gethostbyname(name)}"
    except OSError:
        address = f"{name!r} has none"
    return (
        f"gloo takes the network interface that {INTERFACE} names ({named!r} on this rank), or without it the address "
        f"of the host's name ({address}): set it to an interface that reaches the other hosts ('ip -br address' lists "
        "them), or to 'lo' on a single host, in the environment of every rank"
    )
