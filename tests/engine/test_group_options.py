"""What groups of an optimizer say in words, which ranks compare."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ds_parity.engine.internals.group_options import Options, numbers_of

RATE = ("the learning rate of parameter group 0", "0.1")


def engine_of(optimizer, scale=None, clip=1.0):
    return SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=optimizer.param_groups, loss_scale=scale),
        basic_optimizer=optimizer,
        get_lr=lambda: [group["lr"] for group in optimizer.param_groups],
        fp16_enabled=lambda: scale is not None,
        gradient_clipping=lambda: clip,
    )


def adam(**keys):
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.1, **keys)


@pytest.mark.parametrize("same", [1, 1.0, np.float64(1), np.float32(1), torch.tensor(1.0), torch.tensor([1.0])[0]])
def test_equal_numbers_are_said_alike(same):
    assert numbers_of({"params": [], "lr": same}) == {"lr": "1"}


def test_what_no_optimizer_reads_is_not_said():
    said = numbers_of({"lr": 0.1, "name": "a", "rank": 3, "foreach": True, "betas": (0.9, 0.95), "d": 1e-6})
    assert said == {"lr": "0.1", "betas": "(0.9, 0.95)"}


def test_only_what_has_changed_stands_beside_the_rate():
    optimizer = adam()
    options = Options(engine_of(optimizer))
    assert options.told() == (RATE,)
    optimizer.param_groups[0] |= {"betas": (0.5, 0.6), "step": 7, "d": 1e-5}  # Prodigy measures d on each rank
    assert options.told() == (RATE, ("betas of parameter group 0", "(0.5, 0.6)"))


def test_a_group_that_came_later_says_all_of_it():
    optimizer = adam()
    options = Options(engine_of(optimizer))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2})
    first, second, *others = options.told()
    assert (first, second) == (RATE, ("the learning rate of parameter group 1", "0.2"))
    assert ("betas of parameter group 1", "(0.9, 0.999)") in others


@pytest.mark.parametrize("value", [np.ones(2), object(), None, {"a": 1}])
def test_what_is_no_plain_number_is_left_alone(value):
    optimizer = adam()
    options = Options(engine_of(optimizer))
    optimizer.param_groups[0]["weight_decay"] = value
    assert options.told() == (RATE,)


def test_the_scale_of_fp16_and_another_clipping_stand_behind_the_rates():
    clip, optimizer = [1.0], adam()
    engine = engine_of(optimizer, scale=65536.0)
    engine.gradient_clipping = lambda: clip[0]
    options = Options(engine)
    assert options.told() == (RATE, ("the loss scale", "65536"))
    clip[0] = 0.5
    assert options.told() == (RATE, ("the loss scale", "65536"), ("gradient_clipping", "0.5"))


def test_a_number_that_became_a_tensor_is_told_without_reading_it():
    optimizer = adam()
    options = Options(engine_of(optimizer))
    optimizer.param_groups[0]["weight_decay"] = torch.ones(2)
    assert options.told() == (RATE, ("weight_decay of parameter group 0", "a tensor"))
