"""A loop in which no backward comes to the engine is told, because nothing else of ds_parity runs there."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.distributed.engines import from_all, listen
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_loop_shapes import CELLS, ahead, engine_of, loss_of, micro_batches, past_the_engine, usual

pytestmark = pytest.mark.ranks

TOLD = "none of them was engine.backward()"
ZEROS = [cell for cell in CELLS if cell[0]]


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


@on_two_ranks
def told(folder):
    """By cell and loop: how often each rank was told."""
    results = {}
    for (stage, kind), (name, loop) in product(ZEROS, LOOPS.items()):
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


@pytest.mark.parametrize(("stage", "kind"), ZEROS)
def test_a_loop_whose_backwards_never_come_to_the_engine_is_told_once(two_ranks, stage, kind):
    found = two_ranks.of(told)
    assert {name: found[f"{stage} {kind} {name}"] for name in LOOPS} == {
        name: [int(loop is past_the_backward)] * 2 for name, loop in LOOPS.items()
    }
