"""What ranks send each other in one exchange of counts, as numbers that are summed over ranks.

A message is a vector of int64, so its size does not grow with the number of ranks: two numbers for the fingerprint, one
for how many ranks ask to stop, and six for each pass. The fingerprint (kind of call, window, pass, configuration) is 24
bits wide and is summed together with its square: by Cauchy-Schwarz n * sum(f^2) equals sum(f)^2 only where all n ranks
sent the same.

Ranks that share a micro-batch (sequence parallelism) have the same counts, which one of them sends. Each adds a
checksum of them: 32 bits, times 1 - n on the rank that sends and 1 on the others, add up to 0 where all n agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_parity.window import Counts, PassTotals

_HEAD = 3  # the fingerprint, its square, and who asks to stop
_FIELDS = 6  # of a pass


@dataclass(frozen=True, slots=True)
class Peers:
    """A rank among those that share its micro-batch.

    Attributes:
        size: how many they are (>= 1).
        own: this rank's number among them (0 to size - 1); number 0 sends the counts.
        first: the global rank of number 0.
    """

    size: int = 1
    own: int = 0
    first: int = 0

    def checksum(self, numbers: Sequence[int]) -> int:
        """Return a number that adds up to 0 over peers with the same numbers (else with a chance of 2^-32)."""
        checksum = zlib.crc32(repr((self.first, numbers)).encode())
        return checksum if self.own else checksum * (1 - self.size)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank says it is, and what it has raised there; ranks that exchange counts must say the same.

    Attributes:
        kind: what it does, as a verb phrase ("runs a pass").
        window: index of its open window (>= 0).
        pass_index: passes that it has counted (>= 0).
        configuration: 24 bits of its settings.
        error: what it has raised; empty where it goes on.
    """

    kind: str
    window: int
    pass_index: int
    configuration: int
    error: str = ""

    def fingerprint(self) -> int:
        """Return 24 bits of the place."""
        return zlib.crc32(repr(self).encode()) & 0xFFFFFF

    def __str__(self) -> str:
        does = f"has raised {self.error} (it {self.kind}" if self.error else self.kind
        where = f"in window {self.window}, pass {self.pass_index}, configuration {self.configuration:06x}"
        return f"{does} {where}{')' if self.error else ''}"


@dataclass(frozen=True, slots=True)
class Announcement:
    """One pass as one rank announces it.

    Attributes:
        counts: what its micro-batch contains.
        out_of_data: the rank has no micro-batch for it: its stream has ended.
        stuck: and no earlier micro-batch either that an idle pass could run.
    """

    counts: Counts = field(default_factory=Counts)
    out_of_data: bool = False
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class GatheredPass:
    """One pass as all ranks know it after the exchange.

    Attributes:
        totals: what it contains over all data-parallel ranks.
        ranks_out_of_data: how many ranks announced it without a micro-batch.
        stuck_ranks: how many of these have nothing to run in an idle pass.
    """

    totals: PassTotals
    ranks_out_of_data: int = 0
    stuck_ranks: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The sum of all ranks' messages.

    Attributes:
        in_sync: all ranks sent the same place.
        peers_agree: ranks that share a micro-batch sent the same counts.
        stopping: some rank asks to stop.
        passes: what the announced passes contain over all ranks.
    """

    in_sync: bool
    peers_agree: bool
    stopping: bool
    passes: tuple[GatheredPass, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends in an exchange.

    Attributes:
        place: where it is.
        passes: what it announces, the same number of passes on every rank.
        stop: it asks all ranks to stop.
        peers: this rank among those that share its micro-batch.
    """

    place: Place
    passes: tuple[Announcement, ...]
    stop: bool = False
    peers: Peers = field(default_factory=Peers)

    def pack(self) -> list[int]:
        """Return the numbers that are summed over ranks; `unpack` reads their sums."""
        fingerprint = self.place.fingerprint()
        numbers: list[int] = []
        for one in self.passes:
            counts = one.counts
            numbers += [counts.rollouts, counts.prompts, counts.tokens, int(counts.active)]
            numbers += [int(one.out_of_data), int(one.stuck)]
        checksum = [self.peers.checksum(numbers)] if self.peers.size > 1 else []
        # The counts of a shared micro-batch enter the sum once.
        sent = [0] * len(numbers) if self.peers.own else numbers
        return [fingerprint, fingerprint * fingerprint, int(self.stop), *sent, *checksum]

    def unpack(self, sums: Sequence[int], ranks: int) -> Answer:
        """Return what the sums of all ranks' numbers say; the inverse of `pack` where there is one rank.

        Args:
            sums: of what `pack` returned, over all ranks.
            ranks: how many ranks were summed (>= 1).
        """
        fingerprints, squares, stops = sums[:_HEAD]
        numbers = sums[_HEAD : _HEAD + _FIELDS * len(self.passes)]
        passes = [
            GatheredPass(PassTotals(*numbers[at : at + 4]), *numbers[at + 4 : at + _FIELDS])
            for at in range(0, len(numbers), _FIELDS)
        ]
        return Answer(
            in_sync=ranks * squares == fingerprints**2,
            peers_agree=self.peers.size == 1 or sums[-1] == 0,
            stopping=stops > 0,
            passes=tuple(passes),
        )
