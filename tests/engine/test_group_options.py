"""What groups of an optimizer say in words, which ranks compare."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ds_parity.engine.internals.group_options import Options, numbers_of

RATE = ("the learning rate of parameter group 0", "0.1")


MODEL = torch.nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1)})


def engine_of(optimizer, scale=None, clip=1.0):
    return SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=optimizer.param_groups, loss_scale=scale),
        module=MODEL,
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


@pytest.mark.parametrize("value", [np.ones(65), torch.ones(65), object(), {"a": 1}])
def test_what_is_no_plain_number_is_left_alone(value):
    optimizer = adam()
    options = Options(engine_of(optimizer))
    optimizer.param_groups[0]["weight_decay"] = value
    assert options.told() == (RATE, ("weight_decay of parameter group 0", "what is no number"))


def test_the_scale_of_fp16_and_another_clipping_stand_behind_the_rates():
    clip, optimizer = [1.0], adam()
    engine = engine_of(optimizer, scale=65536.0)
    engine.gradient_clipping = lambda: clip[0]
    options = Options(engine)
    assert options.told() == (RATE, ("the loss scale", "65536"))
    clip[0] = 0.5
    assert options.told() == (RATE, ("the loss scale", "65536"), ("gradient_clipping", "0.5"))


NUMBERS = [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), np.float16(0.5)]


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_of_any_type_are_read(value):
    optimizer = adam()
    options = Options(engine_of(optimizer))
    optimizer.param_groups[0]["weight_decay"] = value
    assert options.told() == (RATE, ("weight_decay of parameter group 0", "0.5"))


@pytest.mark.parametrize("value", NUMBERS)
def test_the_same_number_in_another_type_has_not_changed(value):
    optimizer = adam(weight_decay=0.5)
    options = Options(engine_of(optimizer))
    optimizer.param_groups[0]["weight_decay"] = value
    assert options.told() == (RATE,)


@pytest.mark.parametrize("value", [torch.tensor(0.5), np.array([0.5]), [0.5]])
def test_what_changes_inside_a_tuple_is_seen(value):
    optimizer = adam()
    optimizer.param_groups[0]["betas"] = (0.5, value)
    options = Options(engine_of(optimizer))
    assert options.told() == (RATE,)
    value[0 if isinstance(value, list) else ...] = 0.25
    assert options.told()[1][1] in ("(0.5, 0.25)", "(0.5, (0.25))")


def test_an_option_that_comes_for_another_key_is_told():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["phase"] = 1
    options = Options(engine_of(optimizer))
    del optimizer.param_groups[0]["phase"]
    optimizer.param_groups[0]["momentum_decay"] = 0.5
    assert options.told() == (RATE, ("momentum_decay of parameter group 0", "0.5"))


@pytest.mark.parametrize("value", [torch.tensor(0.5), np.array([0.5]), [0.5]])
def test_what_changes_in_place_is_seen(value):
    optimizer = adam()
    optimizer.param_groups[0]["weight_decay"] = value
    options = Options(engine_of(optimizer))
    assert options.told() == (RATE,)
    value[0 if isinstance(value, list) else ...] = 0.25
    assert options.told()[1][1] in ("0.25", "(0.25)")


def test_a_tensor_on_a_device_is_not_read():
    optimizer = adam()
    optimizer.param_groups[0]["weight_decay"] = value = torch.ones(2, device="meta")
    options = Options(engine_of(optimizer))
    assert options.told() == (RATE,)
    value += 1
    assert options.told() == (RATE, ("weight_decay of parameter group 0", "a tensor that was written 1 times"))


@pytest.mark.parametrize(("name", "value"), [("momentum_decay", 0.1), ("decoupled_weight_decay", True)])
def test_options_that_come_later_are_told(name, value):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    options = Options(engine_of(optimizer))
    optimizer.param_groups[0][name] = value
    assert options.told() == (RATE, (f"{name} of parameter group 0", str(value)))


def test_other_parameters_of_a_group_are_told_by_their_names():
    optimizer = torch.optim.SGD([{"params": [MODEL["a"]], "lr": 0.1}])
    options, held = Options(engine_of(optimizer)), optimizer.param_groups[0]["params"]
    assert options.told() == (RATE,)
    told = []
    for others in ([], [MODEL["b"]], [MODEL["a"], MODEL["b"]], [MODEL["b"], MODEL["a"]]):
        held[:] = others
        told.append(dict(options.told())["the parameters of parameter group 0"])
    assert len(set(told)) == len(told)
    assert told[0].startswith("0, the first of which is none of the model")
    assert told[1].startswith("1, the first of which is b (names ")
    held[:] = [MODEL["a"]]
    assert options.told() == (RATE,)


def test_no_clipping_is_said():
    optimizer = adam()
    engine = engine_of(optimizer)
    options, engine.gradient_clipping = Options(engine), lambda: None
    assert options.told() == (RATE,), "as the optimizer's, which never was there"
