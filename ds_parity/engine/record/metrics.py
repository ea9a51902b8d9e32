"""The step's loss and metrics, weighted over ranks and passes: summed where they are computed, read when somebody asks.

All of them travel in one sum a step: on the host where they are computed there; else on the device, and the host sums a
flag. The sum has a place for every metric name that the ranks have agreed on; a rank that holds a new name raises the
flag, and only then all ranks agree on it, once: a gather on the host, and there one more sum for the new names.

Where the caller ends windows, what the host sums first travels with the window's counts (`Meter.rider`), so that a step
has one sum on the host. Where the counts of the next passes are known by then, they travel with it (`Meter.company`).

A name that no rank has recorded for a while is forgotten, or names that are new in every step (with a step's number in
them) would make every sum longer for good. In one window of `REVIEWED` a number for each name goes along in the host's
sum, how many ranks have used it; so all ranks forget the same names in the same window.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from ds_parity.engine.ranks.hostsum import PlacedSum, Rider, summed_with
from ds_parity.engine.record.same_losses import LOOKED_AT, SameLosses
from ds_parity.engine.record.samples import Number, weighed

_Samples: TypeAlias = "dict[str, tuple[Number, Number]]"

_LOG = logging.getLogger("ds_parity")

REVIEWED: Final = 64
"""Windows between two looks at which names are still in use: one is forgotten 64 to 127 windows after its last use."""
_MANY_NAMES: Final = 500


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of one window over all ranks, left where they were computed.

    Attributes:
        names: of the metrics.
        vector: float64, (1 + 2 * metrics,): the loss, then the weighted sum and the weight of every name.
    """

    names: tuple[str, ...]
    vector: torch.Tensor

    def with_loss(self, shares: Mapping[str, float], peers: int) -> Sums:
        """Return the same with the loss that these shares of the terms' weighted sums make, without reading them.

        Args:
            shares: of the terms, by the names under which they are recorded.
            peers: ranks that share a micro-batch: each has added its terms whole.
        """
        parts = [shares[name] * self.vector[2 * at + 1] for at, name in enumerate(self.names) if name in shares]
        loss = sum(parts, torch.zeros_like(self.vector[0]))
        return replace(self, vector=torch.cat([loss.reshape(1) / peers, self.vector[1:]]))

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the sum of weight * loss, and the weighted mean of every metric whose weights don't add up to 0.

        Waits for the device, once.
        """
        loss, *sums = self.vector.tolist()
        means = {name: sums[2 * at] / sums[2 * at + 1] for at, name in enumerate(self.names) if sums[2 * at + 1]}
        return loss, dict(sorted(means.items()))


@dataclass(frozen=True, slots=True)
class _Window:
    """What a rank has of a window that ends: its sums, and what it brings to the first sum over ranks.

    Attributes:
        loss: sum of weight * loss, on the device.
        samples: of the metrics.
        names: that the ranks had agreed on.
        new: names that they had not.
        uses: for each agreed name whether this rank has used it, where ranks look; else none.
        compared: what `SameLosses` compares, in the windows in which it does; else nothing, (0,).
        rider: what is summed over ranks first.
    """

    loss: torch.Tensor
    samples: _Samples
    names: tuple[str, ...]
    new: list[str]
    uses: list[int]
    compared: torch.Tensor
    rider: Rider


class Meter:
    """Sums weight * loss and weight * metric without waiting for the device; one small sum over ranks a step.

    Any thread may record: what comes before a window is settled belongs to it, and everything else to the next.

    Args:
        device: where losses are.
        group: the ranks that step together, sequence-parallel peers included.
        over_host: the same ranks over gloo; None with one rank.
        peers: ranks that share a micro-batch and each add its whole loss, 1 without sequence parallelism.
        on_device: sum over ranks on the device, without reading it; else on the host. Default: as the device is.

    Attributes:
        company: what travels with the host's sum of the next window that is settled.
    """

    def __init__(
        self,
        device: torch.device,
        group: Any,
        over_host: PlacedSum | None,
        peers: int = 1,
        *,
        on_device: bool | None = None,
    ) -> None:
        self._device = device
        self._group = group
        self._peers = peers
        self._over_host = over_host
        self.company: Rider | None = None
        self._on_device = device.type != "cpu" if on_device is None else on_device
        self._agreed: tuple[str, ...] = ()
        self._used: set[str] = set()  # by this rank, since names were looked at last
        self._settled = 0
        ranks = 1 if over_host is None else over_host.ranks
        self._same = SameLosses(ranks, parted=ranks > peers, group=group, device=device)
        self._has_warned = False
        self._ending: _Window | None = None
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._samples: _Samples = {}
        # Reading a sum, adding and writing it back is one act, or another thread's number is lost between them. Held by
        # the same thread it may be taken again, so that a signal handler that records in here does not hang.
        self._lock = RLock()

    def add(self, loss: torch.Tensor, units: float) -> None:
        """Add a loss that stands for `units` (its weight where it is a mean, 1 where it is a sum)."""
        # fp64 on the device: thousands of fp32 losses would lose digits, and reading each would wait for the device.
        # Multiplied and added apart: torch.add(alpha=) rounds once, so that a loss in fp64 would differ in its last bit
        # from that of a loop by hand.
        own = loss.detach().reshape(()).to(torch.float64)
        with self._lock:
            self._loss = self._loss + own * units
            if self._settled < LOOKED_AT and self._over_host is not None:
                self._same.look(own)

    def record(self, name: Any, value: Any, weight: Any = None, *, idle: bool = False) -> None:
        """Add to a metric, from any thread; in an idle pass, whose values are a stand-in's, only look at the call.

        Raises:
            WindowError: as `samples.weighed` says.
        """
        summed, units = weighed(name, value, weight, self._device, self._on_device)
        if not idle:
            with self._lock:
                self._add(name, summed, units)

    def add_term(self, name: str, loss: torch.Tensor, times: float, units: float) -> None:
        """Add to the mean of a term of the loss, which is recorded as a metric under its name.

        Args:
            name: of the term.
            loss: of the term, on the device.
            times: what the loss is multiplied by: what it weighs where it is a mean, 1 where it is a sum.
            units: what it weighs.
        """
        with self._lock:
            self._add(name, loss.detach().to(torch.float64) * times, units)

    @property
    def peers(self) -> int:
        """How many ranks share a micro-batch (>= 1)."""
        return self._peers

    def reset(self) -> None:
        """Forget the window's losses and metrics, but not the names that were agreed on."""
        self.take_back()
        # Every rank comes here to load a checkpoint, also one whose last sum failed before others began theirs.
        self._settled = 0
        self._same.begin()
        self._used.clear()
        with self._lock:
            self._taken()

    def rider(self) -> Rider | None:
        """Return what `settle` would sum over ranks first, for a sum that is due before; None with one rank.

        What is recorded from now on belongs to the next window.
        """
        if self._over_host is None:
            return None
        self.take_back()  # what a step() has taken that was refused behind its sum
        self._ending = self._ended()
        return self._ending.rider

    def take_back(self) -> None:
        """Return to the open window what `rider` has taken: the window goes on."""
        ending, self._ending = self._ending, None
        if ending is None:
            return
        self._settled -= 1
        with self._lock:
            self._loss = self._loss + ending.loss
            if len(ending.compared):
                self._same.take_back(ending.compared)
            for name, (summed, units) in ending.samples.items():
                self._add(name, summed, units)

    def settle(self) -> Sums:
        """Return the window's sums over all micro-batches, still on the device, and start the next window at 0."""
        if self._over_host is None:
            with self._lock:
                loss, samples = self._taken()
            names = tuple(samples)
            return Sums(names, self._vector([self._own(loss)], names, samples))
        window, self._ending = self._ending or self._ended(), None
        summed = window.rider.summed
        if summed is None:
            company, self.company = self.company, None
            summed = summed_with(company, window.rider.numbers, self._over_host)
        settled = self._settled_on_device if self._on_device else self._settled_on_host
        return settled(self._over_host, window, summed)

    def _add(self, name: str, summed: Number, units: Number) -> None:
        before = self._samples.get(name, (0.0, 0.0))
        self._samples[name] = before[0] + summed, before[1] + units

    def _taken(self) -> tuple[torch.Tensor, _Samples]:
        taken = self._loss, self._samples
        self._loss, self._samples = torch.zeros_like(self._loss), {}
        return taken

    def _own(self, loss: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a loss that each of its peers has added as a whole."""
        return loss / self._peers if self._peers > 1 else loss

    def _ended(self) -> _Window:
        with self._lock:
            loss, samples = self._taken()
            self._settled += 1
            compared = self._same.taken() if self._settled <= LOOKED_AT else torch.empty(0, device=self._device)
        self._used.update(samples)
        agreed, new, uses = self._agreed, self._new(samples), self._uses()
        own = self._own(loss)
        heads: list[Number] = [float(len(new)), *map(float, uses)]
        if self._on_device:
            # The flag goes over the host: read from the device it would make the host wait for the whole step.
            numbers = torch.tensor(heads, dtype=torch.float64, device="cpu")
        else:
            # The loss, the count of new names and the known metrics travel together: one sum in nearly every step.
            numbers = self._vector([*heads, *compared, own], agreed, samples)
            compared = numbers[len(heads) :][: len(compared)]  # no second copy lives during the step
        return _Window(loss, samples, agreed, new, uses, compared, Rider(numbers))

    def _settled_on_host(self, over: PlacedSum, window: _Window, summed: torch.Tensor) -> Sums:
        heads = 1 + len(window.uses)
        added_anywhere, *used = summed[:heads].tolist()
        behind = heads + len(window.compared)
        if behind > heads:
            self._same.note(summed[heads:behind])
        sums = [summed[behind:]]
        if added_anywhere:
            added = self._agree(over, window.new)
            sums.append(over.start(self._vector([], added, window.samples)).wait())
        settled = Sums(self._agreed, torch.cat(sums))
        self._forget(window.names, used)
        return settled

    def _settled_on_device(self, over: PlacedSum, window: _Window, summed: torch.Tensor) -> Sums:
        added_anywhere, *used = summed.tolist()
        if added_anywhere:
            self._agree(over, window.new)
        vector = self._vector([*window.compared, self._own(window.loss)], self._agreed, window.samples)
        dist.all_reduce(vector, group=self._group)
        if compared := len(window.compared):
            self._same.note(vector[:compared])
            vector = vector[compared:]
        settled = Sums(self._agreed, vector)
        self._forget(window.names, used)
        return settled

    def _uses(self) -> list[int]:
        """Return for each agreed name whether this rank has used it, in the windows in which ranks look; else none."""
        return [] if self._settled % REVIEWED else [int(name in self._used) for name in self._agreed]

    def _forget(self, names: tuple[str, ...], used: Sequence[float]) -> None:
        """Forget the names that no rank has used; `used` has as many of them as there are names, or none."""
        if self._settled % REVIEWED:
            return
        unused = {name for name, ranks in zip(names, used, strict=True) if not ranks}
        self._agreed = tuple(name for name in self._agreed if name not in unused)
        self._used.clear()

    def _new(self, samples: _Samples) -> list[str]:
        known = set(self._agreed)
        return [name for name in samples if name not in known]

    def _agree(self, over: PlacedSum, new: list[str]) -> tuple[str, ...]:
        gathered = over.gathered(new)
        # Sorted, so that the names have the same places in the vectors of all ranks.
        added = tuple(sorted({name for names in gathered for name in names}))
        self._agreed += added
        self._warn_of_many(added)
        return added

    def _warn_of_many(self, added: tuple[str, ...]) -> None:
        if self._has_warned or len(self._agreed) <= _MANY_NAMES:
            return
        self._has_warned = True
        if not dist.is_initialized() or dist.get_rank() == 0:
            _LOG.warning(
                "engine.record() was given %d names in the last windows, as %r now: each new one costs a step a gather "
                "over ranks, and all of the last %d to %d windows are summed in every step; leave what changes (a "
                "step's number, a prompt's id) out of the name, and log single samples yourself",
                len(self._agreed),
                added[0],
                REVIEWED,
                2 * REVIEWED,
            )

    def _vector(self, heads: list[Number], names: tuple[str, ...], samples: _Samples) -> torch.Tensor:
        numbers = [*heads, *(number for name in names for number in samples.get(name, (0.0, 0.0)))]
        # full() hands its number to the device with the call; a copy from host memory would wait for the device.
        tensors = [
            number
            if isinstance(number, torch.Tensor)
            else torch.full((), number, dtype=torch.float64, device=self._device)
            for number in numbers
        ]
        return torch.stack(tensors)
