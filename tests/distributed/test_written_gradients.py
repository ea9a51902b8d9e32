"""Gradients that a loop writes to past torch's count of writes are refused on every rank, or were reduced already."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_

import ds_parity
from ds_parity.config.releases import release
from ds_parity.engine.internals.installed import before
from tests.distributed.engines import from_all, perceptron, refusal
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_loop_shapes import CELLS, REFUSED, extended, loss_of, micro_batches, weights

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def read(parameters):
    """What a loop logs changes nothing."""
    assert all(p.grad.data.norm() >= 0 for p in parameters)


def cleared(parameters):
    for p in parameters:
        p.grad.data.zero_()


def halved(parameters):
    for p in parameters:
        p.grad.data.mul_(0.5)


def replaced(parameters):
    for p in parameters:
        p.grad.data = torch.zeros_like(p.grad)


def filled(parameters):
    for p in parameters:
        p.grad.detach().view(torch.uint8).cpu().numpy().fill(0)


def one_filled_with_nan(parameters):
    for p in parameters[:1]:
        p.grad.data.fill_(torch.nan)


def clipped(parameters):
    if parameters:
        clip_grad_norm_(parameters, 0.01)


ALWAYS = [cleared, clipped]
# They take the same way through DeepSpeed and ds_parity: for `make test-slow`.
AT_LENGTH = [halved, replaced, filled, one_filled_with_nan]


def written(engine, way):
    way([p for p in engine.module.parameters() if p.grad is not None])


def before_each_backward(engine, way):
    for window in micro_batches(dist.get_rank()):
        for seed, rollouts in window:
            loss = loss_of(engine, engine, seed)
            written(engine, way)
            engine.backward(loss, rollouts=rollouts)
            engine.step()


def before_each_step(engine, way):
    for window in micro_batches(dist.get_rank()):
        for seed, rollouts in window:
            engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
            written(engine, way)
            engine.step()


def before_the_last_step(engine, way):
    for window in micro_batches(dist.get_rank()):
        for seed, rollouts in window:
            engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
            if engine.is_gradient_accumulation_boundary():
                written(engine, way)
            engine.step()


def before_finish(engine, way):
    seed, rollouts = next(iter(micro_batches(dist.get_rank())))[0]
    engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
    engine.step()
    written(engine, way)
    engine.finish()


def in_windows_of_the_caller(engine, way):
    for window in micro_batches(dist.get_rank()):
        for number, (seed, rollouts) in enumerate(window):
            loss = loss_of(engine, engine, seed)
            written(engine, way)
            engine.set_gradient_accumulation_boundary(number + 1 == len(window))
            engine.backward(loss, rollouts=rollouts)
        engine.step()


def in_windows_reduced_once(engine, way):
    block = engine.coalesce_grad_reduction if _reduces_in_passes(engine) else nullcontext
    for window in micro_batches(dist.get_rank()):
        with block():
            for seed, rollouts in window:
                loss = loss_of(engine, engine, seed)
                written(engine, way)
                engine.backward(loss, rollouts=rollouts)
        engine.step()


def _reduces_in_passes(engine):
    # Before 0.19.2 there is no such block, and ZeRO 2 and 3 reduce in each backward.
    return engine.zero_optimization_stage() > 1 and not before(release("0.19.2"))


PLACES = [before_each_backward, before_each_step, before_the_last_step, before_finish]
BY_CALLER = [in_windows_of_the_caller, in_windows_reduced_once]
# The first cell of each stage and wrapper takes all; the others what reaches the most of them.
PLAIN = ("fp32", "bf16")
DRAWN = [
    *((*cell, *one) for cell in CELLS for one in product([*PLACES, *BY_CALLER], ALWAYS) if cell[1] in PLAIN),
    *((*cell, before_each_backward, cleared) for cell in CELLS if cell[1] not in PLAIN),
]
DRAWN_AT_LENGTH = [(*cell, *one) for cell in CELLS for one in product(PLACES, AT_LENGTH) if cell[1] in PLAIN]


def engine_of(stage, kind, place):
    config = extended(stage, kind)
    if place in BY_CALLER:
        del config["gradient_accumulation_passes"]
        config["ds_parity"] = {"boundary": "caller"}
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return ds_parity.initialize(model=model, optimizer=optimizer, config=config)[0]


@at_length_on_two_ranks
def gradients_that_are_written_to(folder):
    """By cell: what each rank is answered, and the weights; of a loop that only reads, the same."""
    return _written_to(DRAWN)


@at_length_on_two_ranks
def gradients_that_are_written_to_at_length(folder):
    """The same of the other cells."""
    return _written_to(DRAWN_AT_LENGTH)


def _written_to(drawn):
    results = {}
    for stage, kind, place, way in {(*one[:3], read): 0 for one in drawn} | dict.fromkeys(drawn):
        engine = engine_of(stage, kind, place)
        said = from_all(refusal(lambda e=engine, p=place, w=way: p(e, w)))
        results[f"{stage} {kind} {place.__name__} {way.__name__}"] = [said, weights(engine)]
        engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "kind", "place", "way"), DRAWN)
def test_a_gradient_that_is_written_to_is_refused_or_none_is_there(two_ranks_at_length, stage, kind, place, way):
    refused_or_not_there(two_ranks_at_length.of(gradients_that_are_written_to), stage, kind, place, way)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kind", "place", "way"), DRAWN_AT_LENGTH)
def test_so_it_is_in_every_other_way(two_ranks_at_length, stage, kind, place, way):
    refused_or_not_there(two_ranks_at_length.of(gradients_that_are_written_to_at_length), stage, kind, place, way)


def refused_or_not_there(results, stage, kind, place, way):
    only_read = results[f"{stage} {kind} {place.__name__} read"]
    assert only_read[0] == ["nothing was raised"] * 2
    said, left = results[f"{stage} {kind} {place.__name__} {way.__name__}"]
    if said == ["nothing was raised"] * 2:
        assert left == only_read[1]
    else:
        assert all(one.startswith(REFUSED) for one in said), said


@pytest.mark.parametrize(("kind", "place"), product(PLAIN, [*PLACES, *BY_CALLER]))
@pytest.mark.parametrize("stage", [0, 1])
def test_where_gradients_stay_with_their_parameters_they_are_refused(two_ranks_at_length, stage, kind, place):
    """On ZeRO 1 nothing is left of them behind a boundary's backward."""
    said = two_ranks_at_length.of(gradients_that_are_written_to)[f"{stage} {kind} {place.__name__} cleared"][0]
    reduced = stage == 1 and place is before_the_last_step
    assert reduced or all(one.startswith(REFUSED) for one in said), said
