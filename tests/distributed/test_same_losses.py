"""Ranks that train on the same data are told so, once; whatever has another reason to give equal losses is not."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.engine.record.same_losses import LOOKED_AT
from tests.distributed.cells import config
from tests.distributed.engines import from_all, listen
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_model_parts import build as build_parts
from tests.distributed.test_model_parts import with_mpu

pytestmark = pytest.mark.ranks
TOLD = "all ranks have had the same loss in each of 8 windows"


def engine_of(**section):
    model = torch.nn.Linear(4, 1)
    made = {**config(0, passes=4), "ds_parity": section}
    return ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=made)[0]


def told(engine, windows, data, rollouts=lambda number: 1):
    """How often each rank is told."""
    said, end = listen()
    for number in range(2 * windows):
        engine.backward(data(engine, number), rollouts=rollouts(number))
        engine.step()
    end()
    engine.destroy()
    return from_all(said.getvalue().count(TOLD))


def drawn(engine, seed):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(engine.device)
    return engine(x).square().mean()


def alike(engine, number):
    return drawn(engine, number)


def apart(engine, number):
    return drawn(engine, 2 * number + dist.get_rank())


def apart_once(engine, number):
    return drawn(engine, 1000 + dist.get_rank() if number == 5 else number)


def a_constant(engine, number):
    return drawn(engine, number) * 0 + 0.7


def nothing(engine, number):
    return drawn(engine, number) * 0


def nearly(engine, number):
    """Losses of other data that are equal in six digits, as those of DPO may be at its start."""
    return drawn(engine, number) * (1 + 1e-7 * dist.get_rank())


def a_constant_behind_no_number(engine, number):
    return a_constant(engine, number) if number > 1 else no_number(engine, number)


def no_number(engine, number):
    return drawn(engine, number) * float("nan")


LOOPS = {
    loop.__name__: loop
    for loop in (alike, apart, apart_once, a_constant, nothing, nearly, no_number, a_constant_behind_no_number)
}


@on_two_ranks
def loops(folder):
    found = {name: told(engine_of(), LOOKED_AT + 2, loop) for name, loop in LOOPS.items()}
    found["fewer windows"] = told(engine_of(), LOOKED_AT - 1, alike)
    engine = engine_of()
    engine._self_driver.meter._on_device = True
    found["on the device"] = told(engine, LOOKED_AT + 2, alike)
    found["a constant in larger windows"] = told(engine_of(), 2 * LOOKED_AT, a_constant, lambda at: 1 if at % 3 else 3)
    found["behind a load"] = behind_a_load(folder)
    found["with metrics"] = told(engine_of(), LOOKED_AT + 2, with_metrics)
    found["by its caller"] = told(engine_of(boundary="caller"), LOOKED_AT, alike)
    with with_mpu() as mpu:
        found["parts of one model"] = told(build_parts(0, mpu), 3 * LOOKED_AT, alike)
    return found


def behind_a_load(folder):
    engine = engine_of()
    engine.save_checkpoint(f"{folder}/same")
    said, end = listen()
    for number in range(4 * LOOKED_AT):
        engine.backward(alike(engine, number), rollouts=1)
        engine.step()
        if number == 2 * LOOKED_AT - 1:
            engine.load_checkpoint(f"{folder}/same")
    end()
    engine.destroy()
    return from_all(said.getvalue().count(TOLD))


def with_metrics(engine, number):
    engine.record(f"new {number // 6}", float(number))
    return alike(engine, number)


TWICE = ("alike", "on the device", "with metrics", "by its caller", "behind a load")
OTHERS = ("fewer windows", "a constant in larger windows", "parts of one model")


@pytest.mark.parametrize("name", [*LOOPS, *OTHERS, *TWICE[1:]])
def test_the_same_loss_in_many_windows_is_told_once(two_ranks, name):
    assert two_ranks.of(loops)[name] == [int(name in TWICE), 0]
