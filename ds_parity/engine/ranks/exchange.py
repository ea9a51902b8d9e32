"""Counts over the data-parallel group: one small collective on the host, started early and waited for late.

What travels is a sum, so its size does not grow with the number of ranks: six whole numbers a pass, two for the
fingerprint, and how many ranks ask to stop. The fingerprint (window, pass, kind of call, configuration) is 24 bits wide and is summed together with its
square: by Cauchy-Schwarz n * sum(f^2) equals sum(f)^2 only where all n ranks sent the same.

Ranks that share a micro-batch (sequence parallelism) hold the same counts, which one of them sends. Each vouches for
them: a checksum of 32 bits, times 1 - n on the rank that sends and 1 on the others, adds up to 0 where all n agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_parity.engine.ranks.agreement import in_short
from ds_parity.engine.ranks.hostsum import HostSum, Sum
from ds_parity.errors import RankDesyncError
from ds_parity.window import Counts, PassTotals

_GROUPS: dict[tuple[Any, tuple[int, ...], float], Any] = {}
_FIELDS = 6


@dataclass(frozen=True, slots=True)
class Peers:
    """A rank among those that share its micro-batch: how many, its number among them, the first one's rank."""

    size: int = 1
    own: int = 0
    first: int = 0

    def vouch(self, numbers: Sequence[int]) -> int:
        """Return a number that adds up to 0 over peers that hold the same numbers (else with a chance of 2^-32)."""
        checksum = zlib.crc32(repr((self.first, numbers)).encode())
        return checksum if self.own else checksum * (1 - self.size)


_ALONE = Peers()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank says it is, and what it has raised there; ranks that exchange counts must say the same."""

    kind: str
    window: int
    pass_index: int
    configuration: int
    error: str = ""

    def fingerprint(self) -> int:
        """24 bits of the place."""
        return zlib.crc32(repr(self).encode()) & 0xFFFFFF

    def __str__(self) -> str:
        does = f"has raised {self.error} (it {self.kind}" if self.error else self.kind
        where = f"in window {self.window}, pass {self.pass_index}, configuration {self.configuration:06x}"
        return f"{does} {where}{')' if self.error else ''}"


@dataclass(frozen=True, slots=True)
class Slot:
    """One pass as one rank announces it; `dry`: its stream has ended, `stuck`: and it has nothing to re-run."""

    counts: Counts
    active: bool
    dry: bool = False
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """One pass as all ranks know it after the exchange."""

    totals: PassTotals
    dry_ranks: int = 0
    stuck_ranks: int = 0


def host_group(members_of: Any, timeout: float) -> Any:
    """Return a gloo group over the ranks of `members_of`; every rank of the job must call, and alike.

    Args:
        members_of: the data-parallel process group.
        timeout: seconds that an exchange may take before it is an error.
    """
    mine = tuple(dist.get_process_group_ranks(members_of))
    key = (dist.group.WORLD, mine, timeout)
    if key not in _GROUPS:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        for members in sorted(set(told)):
            group = dist.new_group(list(members), backend="gloo", timeout=timedelta(seconds=timeout))
            _GROUPS[dist.group.WORLD, members, timeout] = group
    return _GROUPS[key]


class Exchange:
    """Sums counts over the data-parallel ranks, and refuses ranks that are not in the same place.

    Attributes:
        ranks: ranks that exchange, those that share a micro-batch included.
        slots: passes that one exchange holds, the same on every rank.
        collectives: how many collectives were started (a diagnosis is not counted).
        stop: this rank asks all to stop, with the next exchange that it starts.
        stopping: some rank did, as all ranks know it from the same exchange on.
    """

    def __init__(self, group: Any, ranks: int, slots: int, timeout: float, peers: Peers = _ALONE) -> None:
        self.ranks = ranks
        self._peers = peers
        self.slots = slots
        self.collectives = 0
        self.stop = False
        self.stopping = False
        self._group = group
        self._sum = HostSum(group) if ranks > 1 else None
        self._timeout = timeout

    def start(self, place: Place, slots: Sequence[Slot]) -> Pending:
        """Launch the exchange of up to `slots` passes; waits for nothing but an exchange that was left unfinished."""
        padded = [*slots, *[Slot(Counts(), active=False, dry=True)] * (self.slots - len(slots))]
        fingerprint, held, peers = place.fingerprint(), [], self._peers
        for slot in padded:
            counts = slot.counts
            held += [counts.rollouts, counts.prompts, counts.tokens, int(slot.active), int(slot.dry), int(slot.stuck)]
        vouched = [peers.vouch(held)] if peers.size > 1 else []
        sent = [0] * len(held) if peers.own else held
        vector = torch.tensor(
            [fingerprint, fingerprint * fingerprint, int(self.stop), *sent, *vouched], dtype=torch.int64, device="cpu"
        )
        if self._sum is None:
            return Pending(self, place, vector, None)
        self.collectives += 1
        try:
            return Pending(self, place, vector, self._sum.start(vector), slots)
        except RuntimeError as error:
            raise self._gone(place, error) from error

    def finish(self, place: Place, vector: torch.Tensor, work: Sum | None, slots: Sequence[Slot] = ()) -> list[Known]:
        """Wait for an exchange; used by `Pending.wait`."""
        try:
            numbers = (vector if work is None else work.wait()).tolist()
            if self.ranks * numbers[1] != numbers[0] ** 2:
                raise self._parted(place)
            unvouched = numbers.pop() if self._peers.size > 1 else 0
            if unvouched:
                raise self._split(slots)
        except RuntimeError as error:
            raise self._gone(place, error) from error
        self.stopping = self.stopping or numbers[2] > 0
        passes = [numbers[at : at + _FIELDS] for at in range(3, len(numbers), _FIELDS)]
        return [Known(PassTotals(*held[:4]), *held[4:]) for held in passes]

    def refuse(self, place: Place, error: Exception) -> None:
        """Come to the exchange that the others wait in, or will, to say that this rank has raised and trains no further."""
        with suppress(RankDesyncError):
            self.start(replace(place, error=in_short(error)), []).wait()

    def _parted(self, place: Place) -> RankDesyncError:
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, (dist.get_rank(), place), group=self._group)
        lines = "; ".join(f"rank {rank} {where}" for rank, where in told)
        if any(where.error for _, where in told):
            return RankDesyncError(f"this rank stops because another did: {lines}. Mend what it says")
        return RankDesyncError(
            f"ranks are not in the same place: {lines}. Every rank must run the same number of passes with the same "
            "configuration: call idle() on ranks without data, or take micro-batches from passes(), which does"
        )

    def _split(self, slots: Sequence[Slot]) -> RankDesyncError:
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, (self._peers.first, dist.get_rank(), list(slots)), group=self._group)
        split = {first for first, _, held in told for other, _, theirs in told if other == first and theirs != held}
        lines = "; ".join(
            f"rank {rank} {', '.join(f'{slot.counts}' for slot in held) or 'none'}"
            for first, rank, held in told
            if first in split
        )
        return RankDesyncError(
            f"sequence-parallel ranks of one group passed different counts: {lines}. They hold slices of the same "
            "micro-batch, which counts once; pass the counts of the whole micro-batch on each of them"
        )

    def _gone(self, place: Place, error: RuntimeError) -> RankDesyncError:
        return RankDesyncError(
            f"rank {dist.get_rank()} waited in {place.kind}, window {place.window}, pass {place.pass_index}, for the "
            f"counts of the other {self.ranks - 1} ranks, up to {self._timeout:g} s (ds_parity.exchange_timeout): one of "
            "them ended, or runs a different number of passes. Call idle() on ranks without data, or take micro-batches "
            f"from passes(), which does. ({str(error).splitlines()[0]})"
        )


@dataclass(slots=True)
class Pending:
    """An exchange under way."""

    exchange: Exchange
    place: Place
    vector: torch.Tensor
    work: Sum | None
    slots: Sequence[Slot] = ()

    def proceed(self) -> None:
        """Answer ranks that wait for it from now on, whatever this one does before it waits."""
        if self.work is not None:
            self.work.proceed()

    def wait(self) -> list[Known]:
        """Return what the passes held over all ranks.

        Raises:
            RankDesyncError: on every rank, where ranks are not in the same place, one is gone, or time ran out.
        """
        return self.exchange.finish(self.place, self.vector, self.work, self.slots)
