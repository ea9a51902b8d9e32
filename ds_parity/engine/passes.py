"""Passes in lock-step over streams that run dry at different times, with counts known ahead."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ds_parity.engine.driver import Driver
from ds_parity.engine.ranks.exchange import Known, Pending, Slot
from ds_parity.errors import WindowError
from ds_parity.window import Counts, PassTotals

_END: Any = object()


@dataclass(slots=True, eq=False)
class _Planned:
    batch: Any
    own: Counts
    known: Known | None = None


class PassQueue:
    """The next passes of this rank: read from its stream, announced together, handed out one by one.

    Args:
        driver: whose exchange announces them.
        stream: micro-batches of this rank, with `rollouts`, `prompts` and `tokens`.
        chunk: passes exchanged together (>= 1).
        stand_in: what idle passes run until a micro-batch was seen.
        skip_idle: hand out no idle pass that needs none (`Driver.may_skip`).
    """

    def __init__(
        self, driver: Driver, stream: Iterable[Any], chunk: int, stand_in: Any = None, *, skip_idle: bool = False
    ) -> None:
        driver.look_ahead(chunk)
        self._skip_idle = skip_idle
        self._driver = driver
        self._stream = iter(stream)
        self._chunk = chunk
        self._smallest = stand_in
        self._queue: deque[_Planned] = deque()
        self._pending: Pending | None = None
        self._unknown: list[_Planned] = []
        self._dry = False
        self._all_dry = False
        self._handed: Counts | None = None

    def __iter__(self) -> Iterator[Any]:
        while not self._driver.stops_here():
            self._fill()
            if not self._queue:
                return
            if self._skipped():
                continue
            planned = self._queue[0]
            self._handed = planned.own
            yield planned.batch
            if self._queue and self._queue[0] is planned:
                raise WindowError(
                    "passes() was asked for the next micro-batch before the last had its backward(): all ranks count on "
                    "every pass; what is to be left out must be left out of the stream"
                )

    @property
    def idle(self) -> bool:
        """Whether the pass that was handed out last is an idle one here: what runs is a stand-in."""
        return self._handed == Counts()

    def take(self) -> tuple[Counts, Known, list[PassTotals]]:
        """Return the counts of the pass that was handed out last, and what is known of the passes after it."""
        if not self._queue:
            raise WindowError(
                "backward() inside passes(), but the micro-batch it handed out had its backward() already"
            )
        self._learn()
        planned = self._queue.popleft()
        assert planned.known is not None
        # How far a chunk that was begun in the window before reaches into this one is chance: a run that is resumed here
        # begins a chunk. What every window knows of itself is its first chunk.
        within = max(0, self._chunk - 1 - self._driver.ledger.window.passes)
        return (
            planned.own,
            planned.known,
            [later.known.totals for later in islice(self._queue, within) if later.known is not None],
        )

    def next_known(self) -> PassTotals:
        """Return what the pass that was handed out last holds over all ranks."""
        if not self._queue:
            raise WindowError(
                "is_gradient_accumulation_boundary() between two micro-batches of passes(): the next one's counts are "
                "not known yet; ask between backward() and step()"
            )
        self._learn()
        known = self._queue[0].known
        assert known is not None
        return known.totals

    def _skipped(self) -> bool:
        # Between boundaries DeepSpeed may be silent; an idle pass is nothing but its counts then.
        if not self._skip_idle or self._queue[0].own != Counts():
            return False
        if not self._driver.may_skip(self.next_known()):
            return False
        _, known, ahead = self.take()
        self._driver.skip(known, ahead)
        return True

    def _fill(self) -> None:
        # A window starts with at least a chunk known; chunks follow each other, each pass exchanged once.
        wanted = self._chunk if self._driver.ledger.window.passes == 0 else 1
        while len(self._queue) < wanted and not self._all_dry:
            pending = self._announce()
            if self._chunk > 1 or self._dry:
                self._learn()
            else:
                # This rank goes into its forward; one whose stream has ended waits to hear whether there is a pass at
                # all, and ZeRO 3's forward waits for that one.
                pending.proceed()

    def _announce(self) -> Pending:
        try:
            read = self._read()
        except Exception as error:
            self._driver.refuse(error, ahead=self._chunk > 1)
            raise
        padding = self._chunk - len(read)
        stuck = padding > 0 and not read and self._smallest is None
        slots = [self._driver.slot(planned.own) for planned in read]
        slots += [Slot(Counts(), active=False, dry=True, stuck=stuck)] * padding
        read += [_Planned(_fresh(self._smallest), Counts()) for _ in range(padding)]
        self._unknown = read
        self._queue.extend(read)
        self._pending = self._driver.announce(slots)
        return self._pending

    def _read(self) -> list[_Planned]:
        read: list[_Planned] = []
        while len(read) < self._chunk and not self._dry:
            batch = next(self._stream, _END)
            if batch is _END:
                self._dry = True
                break
            if self._smallest is None or batch.tokens < self._smallest.tokens:
                self._smallest = batch
            own = Counts(batch.rollouts, batch.prompts, batch.tokens)
            self._driver.refuse_mean_of_parts(own, len(getattr(batch, "held", ())))
            read.append(_Planned(batch, own))
        return read

    def _learn(self) -> None:
        if self._pending is None:
            return
        answer, self._pending = self._pending.wait(), None
        ranks = self._driver.ranks
        for planned, known in zip(self._unknown, answer, strict=True):
            planned.known = known
            if known.dry_ranks == ranks:
                self._all_dry = True
                self._queue.remove(planned)
            elif known.stuck_ranks:
                raise WindowError(
                    f"{known.stuck_ranks} of {ranks} ranks have no micro-batch at all, so their idle passes have nothing "
                    "to run; give passes() a small one to stand in: passes(stream, idle=micro_batch)"
                )


def _fresh(batch: Any) -> Any:
    # A loop may take its inputs apart; an idle pass must find them whole.
    again = copy.copy(batch)
    inputs = getattr(batch, "inputs", None)
    if isinstance(inputs, Mapping):
        object.__setattr__(again, "inputs", dict(inputs))
    return again
