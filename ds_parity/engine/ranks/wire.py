"""What ranks send each other on the host, as numbers that are summed over ranks.

Every sum begins with two numbers for the fingerprint of its place (kind of call, engine, window, pass, configuration)
and of its length. The fingerprint is 24 bits wide and is summed together with its square: by Cauchy-Schwarz
n * sum(f^2) equals sum(f)^2 only where all n ranks sent the same.

Where callers end windows, one sum a window holds what each rank has run in it (`WindowMessage`), in float64.

In an exchange of counts one number follows for how many ranks ask to stop and how many may say early what they run,
two for how many ranks begin plans and which these are (a number and its square, by which they are compared as places
are, but for a chance of 2^-18), and six for each pass (and one for each weight that a micro-batch brings): int64, or
float64 with weights, and no more of them for more ranks. How many ranks give their rollouts, and how many don't, shares
two of the six.

Ranks that share a micro-batch (sequence parallelism) have the same counts, which one of them sends. Each adds a
checksum of them: 32 bits, times 1 - n on the rank that sends and 1 on the others, add up to 0 where all n agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from ds_parity.window import Counts, PassTotals, Window, WindowTotals

_HEAD = 3  # how many ranks ask to stop, and how many may be early; how many begin plans, and which
_FIELDS = 6  # of a pass
# Two counts share a number: each is below 2**21, so that the sum is exact in float64 too.
_EARLY = 1 << 32
_BEGINS = 1 << 32
_USUAL = 1 << 32
MOST_PLANS: Final = 1 << 18
"""What stands for the plans that a rank begins is below it: sums of its squares are exact on 2**14 ranks."""
RUNS: Final = "runs a pass"
RUNS_WHOLE: Final = "runs a pass of a window that it knows as a whole (lookahead 'window')"
SAVES: Final = "saves a checkpoint"
SAVED: Final = "has saved a checkpoint"
LOADS: Final = "loads a checkpoint"
LOADED: Final = "has loaded a checkpoint"
RESUMES: Final = "goes on from a checkpoint"
FOUND_NONE: Final = "has found no checkpoint to load"
ANYWHERE: Final = -1
"""The window of a place where ranks may come from different ones."""


AT_THE_START: Final = "what it was at the start"
_SHOWN: Final = 4


def differing_rates(rates: Mapping[int, Iterable[tuple[str, str]]]) -> str:
    """Return in words where ranks differ in what a step would use.

    Args:
        rates: by rank, as `Place.rates`.
    """
    by_rank = {rank: dict(told) for rank, told in rates.items()}
    names = dict.fromkeys(name for named in by_rank.values() for name in named)
    told = [(name, {rank: named.get(name, AT_THE_START) for rank, named in by_rank.items()}) for name in names]
    apart = [f"{name} ({of_each(values)})" for name, values in told if len({*values.values()}) > 1]
    return some_of(apart)


def some_of(texts: Sequence[str]) -> str:
    """Return the first of some texts in a row, and how many more there are."""
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def of_each(values: Mapping[int, Any]) -> str:
    """Return what ranks have, once for each value: at 1,000 ranks all but one may have the same."""
    first: dict[Any, int] = {}
    for rank, value in values.items():
        first.setdefault(value, rank)
    return some_of([f"rank {rank} has {value}" for value, rank in first.items()])


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

    def checksum(self, numbers: Sequence[float]) -> int:
        """Return a number that adds up to 0 over peers with the same numbers (else with a chance of 2^-32)."""
        checksum = zlib.crc32(repr((self.first, numbers)).encode())
        return checksum if self.own else checksum * (1 - self.size)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank says it is, and what it has raised there; ranks that sum or gather must say the same.

    Attributes:
        kind: what it does, as a verb phrase ("runs a pass").
        window: index of its open window (>= 0), or ANYWHERE.
        pass_index: passes that it has counted (>= 0).
        configuration: 24 bits of its settings.
        engine: number of its engine, as the ranks have agreed on it (>= 1); 0 where there is no engine yet.
        error: what it has raised; empty where it goes on.
        used: 24 bits of the parameters that got gradients in the window; 0 where ranks need not agree on them.
        rates: names and values of what the coming step uses, as `Options.told` gives them; empty where there is no
            step.
    """

    kind: str
    window: int = 0
    pass_index: int = 0
    configuration: int = 0
    engine: int = 0
    error: str = ""
    used: int = 0
    rates: tuple[tuple[str, str], ...] = ()

    def head(self, length: int) -> list[int]:
        """Return the numbers that a sum of `length` numbers begins with: the fingerprint and its square."""
        fingerprint = self.fingerprint(length)
        return [fingerprint, fingerprint * fingerprint]

    def fingerprint(self, length: int = 0) -> int:
        """Return 24 bits of the place, and of how many numbers are summed there (>= 0)."""
        return zlib.crc32(repr((self, length)).encode()) & 0xFFFFFF

    def __str__(self) -> str:
        does = f"has raised {self.error} (it {self.kind}" if self.error else self.kind
        window = "" if self.window == ANYWHERE else f"window {self.window}, pass {self.pass_index}, "
        place = f" in {window}engine {self.engine}, configuration"
        where = f"{place} {self.configuration:06x}" if self.engine else ""
        where += f", with gradients of parameters {self.used:06x}" if self.used else ""
        return f"{does}{where}{')' if self.error else ''}"


def heads_agree(heads: Sequence[int], ranks: int) -> bool:
    """Whether all ranks were in the same place, from the sums of what `Place.head` returned on each of them."""
    fingerprints, squares = heads
    return ranks * squares == fingerprints**2


class Gives(Enum):
    """Whether a rank's loop gives the rollouts of its micro-batches: it has no active one, or has done both, EITHER."""

    EITHER = 0
    ALWAYS = 1
    NEVER = 2

    @classmethod
    def of(cls, active: int, usual: int) -> Gives:
        """Return it of how many micro-batches were active, and for how many of these it left them out."""
        if not active or 0 < usual < active:
            return cls.EITHER
        return cls.NEVER if usual else cls.ALWAYS


@dataclass(frozen=True, slots=True)
class Announcement:
    """One pass as one rank announces it.

    Attributes:
        counts: what its micro-batch contains.
        out_of_data: the rank has no micro-batch for it: its stream has ended.
        stuck: it has nothing to run in it: neither a micro-batch with inputs nor an earlier one.
        gives: how the rank's loop has counted its micro-batches in the window, this one included.
    """

    counts: Counts = field(default_factory=Counts)
    out_of_data: bool = False
    stuck: bool = False
    gives: Gives = Gives.EITHER


@dataclass(frozen=True, slots=True)
class GatheredPass:
    """One pass as all ranks know it after the exchange.

    Attributes:
        totals: what it contains over all data-parallel ranks.
        ranks_out_of_data: how many ranks announced it without a micro-batch.
        stuck_ranks: how many have nothing to run in it.
    """

    totals: PassTotals
    ranks_out_of_data: int = 0
    stuck_ranks: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The sum of all ranks' messages.

    Attributes:
        peers_agree: ranks that share a micro-batch sent the same counts.
        stopping: some rank asks to stop.
        early: how many ranks may announce passes in the step before them.
        begin: how many ranks begin plans.
        plans_agree: these begin the same ones.
        counted_alike: no rank gives its rollouts while another leaves them out.
        passes: what the announced passes contain over all ranks.
    """

    peers_agree: bool
    stopping: bool
    early: int
    begin: int
    plans_agree: bool
    counted_alike: bool
    passes: tuple[GatheredPass, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends in an exchange.

    Attributes:
        passes: what it announces, the same number of passes on every rank.
        stop: it asks all ranks to stop.
        peers: this rank among those that share its micro-batch.
        weights: how many weights a micro-batch brings, as many numbers more for each pass; with weights all numbers are
            float64, in which counts are exact up to 2**53, and int64 otherwise.
        early: this rank may announce its next passes in the step before them.
        begun: a number of the plans of which this rank has read its first micro-batch since it told of some (1 to
            2**18 - 1), the same where they are the same; 0 for none.
    """

    passes: tuple[Announcement, ...]
    stop: bool = False
    peers: Peers = field(default_factory=Peers)
    weights: int = 0
    early: bool = False
    begun: int = 0

    def pack(self) -> list[float]:
        """Return the numbers that are summed over ranks; `unpack` reads their sums."""
        numbers: list[float] = []
        for one in self.passes:
            counts = one.counts
            numbers += [counts.rollouts, counts.prompts, counts.tokens, int(counts.active)]
            numbers += [int(one.out_of_data), int(one.stuck)]
            numbers += counts.weights or [0] * self.weights
        checksum = [self.peers.checksum(numbers)] if self.peers.size > 1 else []
        for at, one in enumerate(self.passes):
            end = (at + 1) * (_FIELDS + self.weights) - self.weights
            numbers[end - 2] += _USUAL * (one.gives is Gives.ALWAYS)
            numbers[end - 1] += _USUAL * (one.gives is Gives.NEVER)
        # The counts of a shared micro-batch enter the sum once.
        sent: list[float] = [0] * len(numbers) if self.peers.own else numbers
        begun = [_BEGINS + self.begun, self.begun**2] if self.begun else [0, 0]
        return [int(self.stop) + _EARLY * int(self.early), *begun, *sent, *checksum]

    def unpack(self, sums: Sequence[float]) -> Answer:
        """Return what the sums of all ranks' numbers say; the inverse of `pack` where there is one rank.

        Args:
            sums: of what `pack` returned, over all ranks.
        """
        fields = _FIELDS + self.weights
        numbers = sums[_HEAD : _HEAD + fields * len(self.passes)]
        starts = range(0, len(numbers), fields)
        passes = [self._gathered(numbers[at : at + fields]) for at in starts]
        mixed = any(min(numbers[at + _FIELDS - 2 : at + _FIELDS]) >= _USUAL for at in starts)
        begin, plans = divmod(int(sums[1]), _BEGINS)
        return Answer(
            peers_agree=self.peers.size == 1 or sums[-1] == 0,
            stopping=sums[0] % _EARLY > 0,
            early=int(sums[0] // _EARLY),
            begin=begin,
            plans_agree=heads_agree((plans, int(sums[2])), begin),
            counted_alike=not mixed,
            passes=tuple(passes),
        )

    def _gathered(self, numbers: Sequence[float]) -> GatheredPass:
        rollouts, prompts, tokens, active, out_of_data, stuck = (round(number) for number in numbers[:_FIELDS])
        weights = tuple(numbers[_FIELDS:])
        totals = PassTotals(rollouts, prompts, tokens, active, weights if any(weights) else ())
        return GatheredPass(totals, out_of_data % _USUAL, stuck % _USUAL)


@dataclass(frozen=True, slots=True)
class WindowMessage:
    """What one rank has run in a window that callers end.

    Numbers are float64, because weights may be fractions: whole numbers are exact up to 2**53, and beyond it the sum is
    still the same on every rank.

    Attributes:
        window: this rank's own.
        weights: how many weights a micro-batch brings.
        stop: it asks all ranks to stop.
        peers: this rank among those that share its micro-batches.
        gives: how this rank's loop has counted its micro-batches in the window.
    """

    window: Window
    weights: int = 0
    stop: bool = False
    peers: Peers = field(default_factory=Peers)
    gives: Gives = Gives.EITHER

    def pack(self) -> list[float]:
        """Return the numbers that are summed over ranks, but for the last: the greatest is taken of that."""
        own = self.window
        numbers: list[float] = [own.micro_batches, own.rollouts, own.prompts, own.tokens, own.weight]
        numbers += own.weights or [0] * self.weights
        checksum = [self.peers.checksum([*numbers, own.passes])] if self.peers.size > 1 else []
        sent: list[float] = [0] * len(numbers) if self.peers.own else numbers
        gives = Gives.EITHER if self.peers.own else self.gives
        sent[0] += _USUAL * (gives is Gives.NEVER)
        return [int(self.stop) + _USUAL * (gives is Gives.ALWAYS), *sent, *checksum, own.passes]

    def unpack(self, sums: Sequence[float]) -> tuple[bool, bool, bool, WindowTotals]:
        """Return whether peers agree, ranks counted alike, one asks to stop, and what all ranks' window contains.

        Args:
            sums: of what `pack` returned, over all ranks.
        """
        active, rollouts, prompts, tokens = (round(number) for number in sums[1:5])
        weights = tuple(sums[6 : 6 + self.weights])
        totals = WindowTotals(
            round(sums[-1]), active % _USUAL, rollouts, prompts, tokens, sums[5], weights if any(weights) else ()
        )
        agree = self.peers.size == 1 or sums[6 + self.weights] == 0
        return agree, min(sums[:2]) < _USUAL, sums[0] % _USUAL > 0, totals
