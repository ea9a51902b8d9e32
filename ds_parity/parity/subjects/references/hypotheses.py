"""What known faults would make of a window: with which coefficients its tokens' log probabilities enter the loss.

The loss of a window is linear in sums of log probabilities over tokens of each rollout, and so is that of a window with
a fault that weighs micro-batches otherwise, masks otherwise or takes other advantages. Each such fault is a matrix of
coefficients, and from one gradient of each sum follow the loss and the gradient of all of them. Names say what was
done, after a colon with which pass or rank; `diagnosis/meanings.py` says what follows from which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ds_parity.config import Settings
from ds_parity.parity.running.layouts import Layout, Passes
from ds_parity.parity.subjects.oracle import PlannedWindow, coefficients, weighs, weight
from ds_parity.planning.rollout import MicroBatch, Rollout

SUMS = ("loss tokens", "all tokens", "all tokens and padding")
"""Over which tokens of a rollout log probabilities are summed; padding is that of its micro-batch."""


@dataclass(frozen=True)
class HeldCell:
    """One micro-batch that holds rollouts.

    Attributes:
        at: its pass, counted over the whole run.
        rank: on which it runs.
        held: its rollouts, in the order of its rows.
        batch: as it is collated.
        own: the coefficient with which the mean loss of it enters the step.
    """

    at: int
    rank: int
    held: tuple[Rollout, ...]
    batch: MicroBatch
    own: float


@dataclass(frozen=True)
class Supposing:
    """One window, as faults see it.

    Attributes:
        window: which passes it has.
        passes: of the whole run.
        layout: of the whole run.
        settings: the extra keys; the loss has one term.
        uses_advantages: whether the loss is a policy gradient.
    """

    window: PlannedWindow
    passes: Passes
    layout: Layout
    settings: Settings
    uses_advantages: bool

    @cached_property
    def right(self) -> Tensor:
        """(len(SUMS), B) the coefficients of the right loss, which is minus their product with the sums."""
        return self.of_rollouts(partial(_right, self))

    @cached_property
    def cells(self) -> tuple[HeldCell, ...]:
        """The micro-batches that hold rollouts, in the order of the rows."""
        held = [(at, rank, cell) for at in self.places for rank, cell in enumerate(self.layout[at]) if cell]
        return tuple(self._cell(at, rank, tuple(cell)) for at, rank, cell in held)

    def _cell(self, at: int, rank: int, held: tuple[Rollout, ...]) -> HeldCell:
        batch = self.passes[at][rank]
        return HeldCell(at, rank, held, batch, coefficients(batch, self.window, self.settings)[0])

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.passes[0])

    @property
    def places(self) -> range:
        """The passes of the window, counted over the whole run; in some of them all ranks may be idle."""
        return range(self.window.first, self.window.last + 1)

    def all(self) -> dict[str, Tensor]:
        """Return the coefficients by name, of all faults that change any."""
        found = dict(_of_shares(self)) | dict(_of_losses(self))
        return {name: it for name, it in found.items() if not torch.allclose(it, self.right, rtol=1e-9, atol=0.0)}

    def weighed(self, coefficient: Callable[[HeldCell], float]) -> Tensor:
        """Return the right losses of micro-batches, each weighed by another coefficient."""
        times = [coefficient(cell) / cell.own if cell.own else 0.0 for cell in self.cells]
        rows = [factor for factor, cell in zip(times, self.cells, strict=True) for _ in cell.held]
        return self.right * torch.tensor(rows, dtype=torch.float64, device="cpu")

    def of_rollouts(self, share: Callable[[HeldCell, Rollout], float], sums: str = SUMS[0]) -> Tensor:
        """Return (len(SUMS), B): a coefficient for each rollout in its micro-batch, of one of the sums."""
        rows = [share(cell, one) for cell in self.cells for one in cell.held]
        found = torch.zeros(len(SUMS), len(rows), dtype=torch.float64, device="cpu")
        found[SUMS.index(sums)] = torch.tensor(rows, dtype=torch.float64, device="cpu")
        return found

    def units(self, cell: HeldCell) -> float:
        """Return what a micro-batch weighs."""
        return weighs(cell.batch, self.settings)

    def sums(self, key: Callable[[HeldCell], int]) -> Mapping[int, float]:
        """Return what micro-batches of one key weigh together."""
        found: dict[int, float] = {}
        for cell in self.cells:
            found[key(cell)] = found.get(key(cell), 0.0) + self.units(cell)
        return found


def _of_shares(it: Supposing) -> Iterator[tuple[str, Tensor]]:
    """The right loss of each micro-batch, with other shares of the step."""
    yield from _means(it)
    yield from _lost(it)
    for rank in range(it.ranks if it.ranks > 1 else 0):
        yield f"rank-alone:{rank}", it.weighed(lambda c, r=rank: c.own * it.ranks * (c.rank == r))  # type: ignore[misc]
        yield f"rank-left-out:{rank}", it.weighed(lambda c, r=rank: c.own * (c.rank != r))  # type: ignore[misc]


def _means(it: Supposing) -> Iterator[tuple[str, Tensor]]:
    held = [cell for cell in it.cells if not cell.batch.idle]
    if not held:
        return
    by_rank, by_pass = it.sums(lambda cell: cell.rank), it.sums(lambda cell: cell.at)
    on_rank = {rank: sum(cell.rank == rank for cell in held) for rank in range(it.ranks)}
    # What the loss of the whole step would be multiplied by in any case stays: the division by a target, or a constant.
    scale = sum(cell.own for cell in it.cells)
    passes = sum(1 for weight in by_pass.values() if weight)
    so_far = {at: sum(units for other, units in by_pass.items() if other <= at) for at in by_pass}
    yield "mean-of-micro-batches", it.weighed(lambda cell: scale / len(held))
    yield "mean-with-idle-ones", it.weighed(lambda cell: scale / (len(it.places) * it.ranks))
    yield "mean-of-ranks", it.weighed(lambda cell: scale * _over(it.units(cell), it.ranks * by_rank[cell.rank]))
    yield "mean-of-passes", it.weighed(lambda cell: scale * _over(it.units(cell), passes * by_pass[cell.at]))
    yield "mean-on-each-rank", it.weighed(lambda cell: scale / (it.ranks * on_rank[cell.rank]))
    yield "running-total", it.weighed(lambda cell: scale * _over(it.units(cell), so_far[cell.at]))
    for unit in ("rollout", "token"):
        whole = sum(weight(cell.batch, unit) for cell in it.cells)
        yield f"weighed-by-{unit}", it.weighed(lambda c, u=unit, w=whole: scale * _over(weight(c.batch, u), w))  # type: ignore[misc]


def _lost(it: Supposing) -> Iterator[tuple[str, Tensor]]:
    """Gradients of some passes that are missing."""
    passes = it.places
    for first in passes[2:-1]:
        yield f"passes-lost:{first - passes[0]}", it.weighed(lambda c, f=first: c.own * (c.at >= f))  # type: ignore[misc]
    if len(passes) > 1:
        yield "first-pass-lost", it.weighed(lambda cell: cell.own * (cell.at != passes[0]))
        yield "last-pass-lost", it.weighed(lambda cell: cell.own * (cell.at != passes[-1]))
        yield "last-pass-alone", it.weighed(lambda cell: cell.own * (cell.at == passes[-1]))


def _of_losses(it: Supposing) -> Iterator[tuple[str, Tensor]]:
    """Other losses of the micro-batches, whose means have the right shares of the step."""
    yield "other-mean", it.of_rollouts(lambda cell, one: _advantage(it, one) * _other_mean(it, cell, one))
    yield from _unmasked(it)
    silent = {(at + 1, rank) for at, row in enumerate(it.passes) for rank, one in enumerate(row) if one.idle}
    yield "lost-after-idle", it.weighed(lambda cell: cell.own * ((cell.at, cell.rank) not in silent))
    if it.uses_advantages:
        yield from _other_advantages(it)


def _other_mean(it: Supposing, cell: HeldCell, one: Rollout) -> float:
    """Return the coefficient of a token where micro-batches average over rollouts for tokens, or the other way."""
    by_tokens = it.settings.loss_weight in ("token", "divided")
    return _over(cell.own, len(cell.held) * one.loss_tokens if by_tokens else sum(r.loss_tokens for r in cell.held))


def _mean(it: Supposing, cell: HeldCell, one: Rollout) -> float:
    """Return the coefficient of a loss token."""
    by_tokens = it.settings.loss_weight in ("token", "divided")
    return _over(cell.own, sum(r.loss_tokens for r in cell.held) if by_tokens else len(cell.held) * one.loss_tokens)


def _right(it: Supposing, cell: HeldCell, one: Rollout) -> float:
    return _advantage(it, one) * _mean(it, cell, one)


def _unmasked(it: Supposing) -> Iterator[tuple[str, Tensor]]:
    """All tokens in the numerator, prompts with them; of the second padding too, and of the third the denominator."""
    _, every, padded = SUMS
    by_tokens = it.settings.loss_weight in ("token", "divided")

    def over_all(cell: HeldCell, one: Rollout) -> float:
        lengths = sum(len(other.tokens) - 1 for other in cell.held)
        return _advantage(it, one) * cell.own / (lengths if by_tokens else len(cell.held) * (len(one.tokens) - 1))

    yield "unmasked-numerator", it.of_rollouts(partial(_right, it), every)
    yield "unmasked-numerator-and-padding", it.of_rollouts(partial(_right, it), padded)
    yield "unmasked", it.of_rollouts(over_all, every)


def _other_advantages(it: Supposing) -> Iterator[tuple[str, Tensor]]:
    """Rows that take the first advantages of a larger batch; and none."""
    yield "no-advantages", it.of_rollouts(lambda cell, one: _mean(it, cell, one))
    whole = range(len(it.layout))
    for name, places in (("run", whole), ("window", it.places)):
        for of, ranks in (("rank", None), ("all", range(it.ranks))):
            rows = [_first(it, cell, places, ranks or (cell.rank,)) for cell in it.cells]
            if all(len(row) == len(cell.held) for row, cell in zip(rows, it.cells, strict=True)):
                taken = torch.tensor([one for row in rows for one in row], dtype=torch.float64, device="cpu")
                yield f"advantages-of-{name}:{of}", taken * it.of_rollouts(lambda cell, one: _mean(it, cell, one))


def _first(it: Supposing, cell: HeldCell, places: range, ranks: range | tuple[int, ...]) -> list[float]:
    """Return the first advantages of a larger batch, as many as a micro-batch has rows."""
    every = (one.advantage for at in places for rank in ranks for one in it.layout[at][rank])
    return [value for value, _ in zip(every, cell.held, strict=False)]


def _advantage(it: Supposing, one: Rollout) -> float:
    return one.advantage if it.uses_advantages else 1.0


def _over(one: float, other: float) -> float:
    return one / other if other else 0.0
