"""What a loop does beside the engine: it reads gradients, steps optimizers, adds parameters, sets a default device."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

from tests.distributed.cells import STAGES
from tests.distributed.engines import perceptron
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_changing_parameters import Pair, ones
from tests.distributed.test_loop_shapes import engine_of, loss_of, sample, weights

pytestmark = pytest.mark.ranks


def answer(call):
    """The first words of the error that `call` ends in, whoever raises it."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# Gradients that are read between backward() and step().

# Rollouts of both ranks by pass: windows of 11 and 10 rollouts whose losses are divided by 10 and by 9.
READ = (((3, 2), (3, 3)), ((2, 2), (3, 3)))


def mean_of(values, window, number):
    """The gradient of a window over all ranks, in fp64, at these weights."""
    model = perceptron().double()
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = torch.tensor(value, dtype=torch.float64).view(parameter.shape)
    total = sum(map(sum, window))
    for at, counts in enumerate(window):
        for rank, rollouts in enumerate(counts):
            loss = model(sample(100 * number + 10 * at + rank).cpu().double()).pow(2).mean()
            (loss * rollouts / total).backward()
    return [p.grad.flatten().tolist() for p in model.parameters()]


def shown(parameter, stage):
    return parameter.grad if stage == 0 else safe_get_full_grad(parameter)


@on_two_ranks
def gradients_that_are_read(folder):
    """By stage: of each window its correction, the gradient as it is shown there, and as it is."""
    results = {}
    for stage in STAGES:
        engine, _ = engine_of(stage)
        windows = []
        for number, window in enumerate(READ):
            values = weights(engine)
            for at, counts in enumerate(window):
                loss = loss_of(engine, engine, 100 * number + 10 * at + dist.get_rank())
                engine.backward(loss, rollouts=counts[dist.get_rank()])
                if engine.is_gradient_accumulation_boundary():
                    read = [shown(p, stage).double().cpu().flatten().tolist() for p in engine.module.parameters()]
                    windows.append([engine.window.correction, read, mean_of(values, window, number)])
                engine.step()
        results[f"{stage}"] = windows
        engine.destroy()
    return results


def test_a_gradient_that_is_read_times_the_correction_is_that_of_the_step(two_ranks, stage):
    windows = two_ranks.of(gradients_that_are_read)[stage]
    assert [one for one, *_ in windows] == [10 / 11, 9 / 10]
    for correction, read, right in windows:
        for one, other in zip(read, right, strict=True):
            assert [correction * number for number in one] == pytest.approx(other, abs=1e-6)


@on_two_ranks
def gradients_that_are_set(folder):
    """By stage: how far each weight moves by a gradient of ones that is divided by the correction."""
    results = {}
    for stage in STAGES[1:]:
        engine, _ = engine_of(stage, model=Pair())  # DeepSpeed sets no gradient of fewer elements than ranks
        for counts in READ[0]:
            engine.backward(engine(ones(engine), 0, 1), rollouts=counts[dist.get_rank()])
            if engine.is_gradient_accumulation_boundary():
                for parameter in engine.module.parameters():
                    gradient = safe_get_full_grad(parameter)
                    safe_set_full_grad(parameter, torch.ones_like(gradient) / engine.window.correction)
            engine.step()
        results[f"{stage}"] = [-number for values in weights(engine) for number in values]
        engine.destroy()
    return results


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_gradient_that_is_set_is_divided_by_the_correction(two_ranks, stage):
    moved = two_ranks.of(gradients_that_are_set)[stage]
    assert moved == pytest.approx([0.5] * len(moved), abs=1e-6)
