"""States that leave the accelerator inside a window and come back: the steps are those of an engine that keeps them."""

import pytest

from ds_parity.parity.running import weights
from tests.distributed.cells import config
from tests.distributed.engines import build, one_pass
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

# On ZeRO 3 DeepSpeed moves the states of its own Adam alone.
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.05}}, "scheduler": None}
PRECISIONS = {"fp32": {}, "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}}


def trained(stage, keys, moves):
    extended = {**config(stage, passes=6), **ADAM, **keys}
    del extended["scheduler"]
    engine = build(extended)
    for seed in range(9):
        one_pass(engine, seed)
        if moves:
            engine.offload_states(pin_memory=seed % 2 == 0)
            engine.reload_states()
    vector, step = weights.vector(engine.module).tolist(), engine.last_step.step
    engine.destroy()
    return vector, step


@on_two_ranks
def moved_inside(folder):
    """Three windows of three passes, with and without moving states behind every pass."""
    return {
        f"{stage}-{name}": [trained(stage, keys, moves) for moves in (False, True)]
        for stage in (1, 2, 3)
        for name, keys in PRECISIONS.items()
    }


@pytest.mark.parametrize("name", [f"{stage}-{name}" for stage in (1, 2, 3) for name in PRECISIONS])
def test_states_that_are_moved_inside_a_window_change_no_step(two_ranks, name):
    kept, moved = two_ranks.of(moved_inside)[name]
    assert moved == kept
    assert moved[1] == 3
