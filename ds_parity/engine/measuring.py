"""What a micro-batch costs, measured: passes of different make-up are timed on the model that is to be trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_parity.engine.ranks.hostsum import PlacedSum
from ds_parity.errors import ConfigError, WindowError
from ds_parity.planning import Cost, MicroBatch
from ds_parity.planning.costs import check_make_up


def measure_cost(
    engine: Any,
    micro_batches: Sequence[MicroBatch],
    loss: Callable[[Any, MicroBatch], Tensor],
    *,
    repeats: int = 5,
) -> Cost:
    """Time passes of these micro-batches, and return the cost that fits them, in seconds.

    A pass is a forward and the gradients of its loss, which are thrown away: weights, gradients, buffers, random
    numbers and the open window stay as they are. What DeepSpeed does between ranks in a backward is not in it. Every
    rank of the engine calls, between windows, with micro-batches of the same sizes; all get the same cost, that of the
    slowest rank in each pass.

    Args:
        engine: what `initialize` returned, on ZeRO 0 to 2; or a plain module, on one rank.
        micro_batches: at least three of different make-up, on the device: one long rollout, one short one, many short
            ones (`ds_parity.collate`). The largest must leave room for its gradients.
        loss: takes the module and a micro-batch, and returns the loss, as in training.
        repeats: how often each is run after one run that is not timed (>= 1); medians count.

    Returns:
        With `per_pass` as what a pass takes besides its tokens. Multiply it, where ranks gather or reduce in each pass.

    Raises:
        ConfigError: there are fewer than three micro-batches, or all are of one make-up.
        WindowError: a window is open, or parameters are divided over ranks (ZeRO 3).
        RankDesyncError: not every rank has come.
    """
    own = getattr(engine, "measure_cost", None)
    cost: Cost = measured(engine, micro_batches, loss, repeats) if own is None else own(micro_batches, loss, repeats)
    return cost


def measured(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss: Callable[[Any, MicroBatch], Tensor],
    repeats: int,
    over: PlacedSum | None = None,
) -> Cost:
    """As `measure_cost`, of a module; `over` are the ranks that measure together, None where there is one."""
    sizes = [_size(one) for one in micro_batches]
    if len(sizes) < 3 or repeats < 1:
        raise ConfigError(
            f"measure_cost: {len(sizes)} micro-batches, each {repeats} times: it takes at least three, of different "
            "make-up, and repeats from 1"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise WindowError(
            "measure_cost: the parameters are divided over ranks (ZeRO 3), and are put together by a backward that "
            "counts; measure the plain module on one rank, or use ds_parity.Cost.of_model(...)"
        )
    check_make_up("measure_cost", "micro-batches", sizes)
    with _as_it_was(model):
        for one in micro_batches:
            _seconds(model, one, loss)
        rounds = [[_seconds(model, one, loss) for one in micro_batches] for _ in range(repeats)]
    own = [median(times) for times in zip(*rounds, strict=True)]
    every = [own] if over is None else over.gather(own)
    slowest = (max(times) for times in zip(*every, strict=True))
    return Cost.fitted((*size, seconds) for size, seconds in zip(sizes, slowest, strict=True))


def _size(one: MicroBatch) -> tuple[int, int]:
    """Return tokens and squares as a plan counts them: a padded row is as long as the longest."""
    lengths = [len(row.tokens) for unit in one.held for row in unit.sequences]
    if not lengths:
        raise ConfigError("measure_cost: a micro-batch holds no rollouts; make it with ds_parity.collate(rollouts)")
    ids = one.inputs["input_ids"]
    if len(ids) == len(lengths):
        lengths = [ids.shape[1]] * len(lengths)
    return sum(lengths), sum(length**2 for length in lengths)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Keep buffers, such as the statistics of a batch norm, and random numbers, such as those of a dropout."""
    accelerator = get_accelerator()
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    host, device = torch.get_rng_state(), accelerator.get_rng_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
        torch.set_rng_state(host)
        accelerator.set_rng_state(device)


def _seconds(model: nn.Module, one: MicroBatch, loss: Callable[[Any, MicroBatch], Tensor]) -> float:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    get_accelerator().synchronize()
    begun = time.perf_counter()
    # It writes into no .grad, and runs none of the hooks by which ZeRO reduces gradients.
    torch.autograd.grad(loss(model, one), trained, allow_unused=True)
    get_accelerator().synchronize()
    return time.perf_counter() - begun
