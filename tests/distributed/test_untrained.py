"""A loop in which no backward comes to the engine is told, because nothing else of ds_parity runs there."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.distributed.engines import from_all, listen
from tests.distributed.sets import at_length_on_two_ranks, on_two_ranks
from tests.distributed.test_loop_shapes import CELLS, ahead, engine_of, loss_of, micro_batches, past_the_engine, usual

pytestmark = pytest.mark.ranks

TOLD = "none of them was engine.backward()"
ZEROS = [cell for cell in CELLS if cell[0]]
# What has a wrapper of its own; the others have buffers of theirs.
OFTEN = [cell for cell in ZEROS if cell[1] in ("fp32", "fp32 accumulation")]
SELDOM = [cell for cell in ZEROS if cell not in OFTEN]


def past_the_backward(engine, client, window):
    """loss.backward() in place of engine.backward(loss), and nothing else of the engine: accelerate's step is none."""
    for seed, _ in window:
        loss_of(engine, engine, seed).backward()


def looked_at_once(engine, client, window):
    """One backward beside the engine, and forwards without gradients behind it: a look at the gradients."""
    loss_of(engine.module, engine, 1).backward()
    with torch.no_grad():
        for seed, _ in window:
            loss_of(engine, engine, seed)


def taught_by_another(engine, client, window):
    """Another engine trains the same model, and this one gives it targets with gradients on."""
    if not hasattr(engine, "student"):
        engine.student = engine_of(*engine.cell, model=engine.module)[0]
    for seed, rollouts in window:
        target = loss_of(engine, engine, seed).detach()
        engine.student.backward((loss_of(engine.student, engine.student, seed) - target).square(), rollouts=rollouts)
        engine.student.step()


LOOPS = {
    loop.__name__: loop
    for loop in (past_the_backward, usual, ahead, past_the_engine, looked_at_once, taught_by_another)
}


def told_of(cells):
    """By cell and loop: how often each rank was told."""
    results = {}
    for (stage, kind), (name, loop) in product(cells, LOOPS.items()):
        engine, client = engine_of(stage, kind)
        engine.cell = stage, kind
        said, end = listen()
        for _ in range(2):
            for window in micro_batches(dist.get_rank()):
                loop(engine, client, window)
        end()
        results[f"{stage} {kind} {name}"] = from_all(said.getvalue().count(TOLD))
        if hasattr(engine, "student"):
            engine.student.destroy()
        engine.destroy()
    return results


@on_two_ranks
def told(folder):
    return told_of(OFTEN)


@at_length_on_two_ranks
def told_at_length(folder):
    return told_of(SELDOM)


def _told_once(found, stage, kind):
    assert {name: found[f"{stage} {kind} {name}"] for name in LOOPS} == {
        name: [int(loop is past_the_backward)] * 2 for name, loop in LOOPS.items()
    }


@pytest.mark.parametrize(("stage", "kind"), OFTEN)
def test_a_loop_whose_backwards_never_come_to_the_engine_is_told_once(two_ranks, stage, kind):
    _told_once(two_ranks.of(told), stage, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kind"), SELDOM)
def test_so_it_is_where_gradients_lie_in_other_buffers(two_ranks_at_length, stage, kind):
    _told_once(two_ranks_at_length.of(told_at_length), stage, kind)
