"""Torch's counterparts of what a scenario gives DeepSpeed, and schedulers that are put at nominal progress by hand."""

from fractions import Fraction

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

from ds_parity.engine.internals.schedule import RolloutSchedule
from ds_parity.errors import ConfigError
from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.matrix import setups
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import PlannedWindow
from ds_parity.parity.subjects.references.torch_counterparts import ByHand, CPULion, Lion, optimizer_and_scheduler
from ds_parity.parity.subjects.references.torch_steps import TorchSteps
from ds_parity.window import Progress
from tests.distributed import cells

SETUPS = "ds_parity.parity.matrix.setups"


def of(config, setup=None, model=None):
    setup = None if setup is None else f"{SETUPS}:{setup}"
    return optimizer_and_scheduler(Scenario("plain", config, setup=setup, **cells.TINY), model or torch.nn.Linear(2, 2))


def with_optimizer(kind, **parameters):
    return {"optimizer": {"type": kind, "params": parameters}}


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("Adam", torch.optim.AdamW),
        ("AdamW", torch.optim.AdamW),
        ("SGD", torch.optim.SGD),
        ("Adagrad", torch.optim.Adagrad),
        ("RMSprop", torch.optim.RMSprop),
        ("Lion", Lion),
    ],
)
def test_optimizers_are_torchs_own_with_the_parameters_of_the_configuration(kind, found):
    optimizer, _ = of(with_optimizer(kind, lr=0.25, weight_decay=0.125))
    assert type(optimizer) is found
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.25, 0.125)


def test_adam_without_adam_w_mode_puts_the_decay_into_the_gradient():
    optimizer, _ = of(with_optimizer("Adam", lr=0.25, adam_w_mode=False))
    assert type(optimizer) is torch.optim.Adam


@pytest.mark.parametrize("config", [with_optimizer("Lamb"), {}, with_optimizer("lr_scheduler")])
def test_an_optimizer_without_a_counterpart_is_refused_by_name(config):
    name = repr(config.get("optimizer", {}).get("type"))
    with pytest.raises(ConfigError, match=rf"optimizer\.type is {name}.*knows adam, adamw, lion"):
        of(config)


def test_a_configuration_without_a_scheduler_has_none_and_deepspeeds_own_is_taken():
    assert of(with_optimizer("SGD", lr=0.1))[1] is None
    assert of(cells.config(0))[1].get_last_lr() == [0.025]


def test_a_clients_optimizer_and_scheduler_are_taken_as_instances_and_as_functions():
    model = cells.uniform(0, "fp32", 2).build()
    optimizer, scheduler = of({}, "sequential_lr", model)
    assert (type(optimizer), type(scheduler)) == (torch.optim.SGD, lr_scheduler.SequentialLR)
    assert type(of({}, "callable_optimizer", model)[0]) is torch.optim.AdamW
    optimizer, scheduler = of(with_optimizer("SGD", lr=0.1), "callable_scheduler", model)
    assert scheduler.optimizer is optimizer


def test_setups_freeze_and_group_parameters():
    model = cells.uniform(0, "fp32", 2).build()
    assert len(of(with_optimizer("SGD", lr=0.1), "groups", model)[0].param_groups) == 2
    of(with_optimizer("SGD", lr=0.1), "frozen", model)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"policy.embedding.weight"}


def test_lion_takes_the_sign_of_an_average_and_decays_apart_from_it():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    lion = Lion([parameter], lr=0.5, betas=(0.9, 0.99), weight_decay=0.1)
    parameter.grad = torch.tensor([0.3, -4.0])
    lion.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([1 * 0.95 - 0.5, -2 * 0.95 + 0.5]))
    torch.testing.assert_close(lion.state[parameter]["momentum"], torch.tensor([0.003, -0.04]))


def test_lion_offloaded_is_deepspeeds_kernel_which_gives_0_a_sign():
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert type(of(with_optimizer("Lion", lr=0.5) | offloaded)[0]) is CPULion
    for kind, moved in ((Lion, [0.0, -0.5, 0.5]), (CPULion, [-0.5, -0.5, 0.5])):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.tensor([0.0, 1.0, -1.0])
        kind([parameter], lr=0.5).step()
        assert parameter.tolist() == moved


def test_by_hand_a_function_of_the_step_stands_at_a_fraction_and_others_take_whole_steps():
    def rate_of(make, shares):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        by_hand = ByHand(make(optimizer))
        optimizer.step()
        reached = Fraction(0)
        for share in shares:
            reached += Fraction(share.removeprefix("skipped "))
            by_hand.advance(reached, not share.startswith("skipped"))
        return optimizer.param_groups[0]["lr"]

    assert rate_of(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 + step), ["3/4", "3/4"]) == 2.5
    assert rate_of(lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), ["3/4"]) == 1.0
    assert rate_of(lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), ["3/4", "3/4"]) == 0.5
    assert rate_of(lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), ["3/4", "3/4", "3/2"]) == 0.125
    assert rate_of(lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), ["3/4", "skipped 3/4", "1/2"]) == 0.5


@pytest.mark.parametrize("build", [setups.checkpointed, setups.with_unused])
def test_the_matrix_models_compute_what_the_tiny_decoder_does(build):
    tokens = torch.arange(12).view(1, -1)
    torch.testing.assert_close(build(3)(tokens), build_tiny(3)(tokens))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 2}),
        ("WarmupDecayLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "total_num_steps": 9}),
        ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 9}),
        ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 9, "warmup_type": "linear"}),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}),
    ],
)
def test_by_hand_and_in_the_engine_a_schedule_stands_at_the_same_lr_at_every_fraction(name, parameters):
    reached = []
    for by_hand in (True, False):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = getattr(lr_schedules, name)(optimizer, **parameters)
        placed, seen = (ByHand if by_hand else RolloutSchedule)(scheduler), []
        for quarter in range(1, 4 * 10):
            if by_hand:
                placed.advance(Fraction(quarter, 4), applied=True)
            else:
                placed.advance_to(Progress(4, quarter))
                placed.step()
            seen.append(optimizer.param_groups[0]["lr"])
        reached.append(seen)
    assert reached[0] == reached[1]
    assert len(set(reached[0])) >= 5


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_gradient_that_is_not_finite_takes_no_step_and_the_next_one_does(number):
    """As in the engine, on each ZeRO stage."""
    rates = {"warmup_num_steps": 9, "warmup_type": "linear", "warmup_min_lr": 0.1, "warmup_max_lr": 0.5}
    sgd = with_optimizer("SGD", lr=0.5) | {"scheduler": {"type": "WarmupLR", "params": rates}}
    model = torch.nn.Linear(2, 1, bias=False).double()
    steps = TorchSteps(Scenario("plain", cells.config(0, "fp32", 2) | sgd, **cells.TINY), model)
    before, records = model.weight.detach().clone(), []
    window = PlannedWindow(0, 0, 1.0, 1.0, open=False, progress=Fraction(1))
    for step, gradient in enumerate((float(number), 1.0, 1.0, 1.0), start=1):
        model.weight.grad = torch.tensor([[gradient, 1.0]], dtype=torch.float64)
        records.append(steps.step(step, window, (), torch.tensor(0.25)))
        if step == 1:
            assert torch.equal(model.weight, before)
    assert [one.skipped for one in records] == [True, False, False, False]
    assert records[0].grad_norm is None
    # DeepSpeed's warm-up begins with two steps of one rate.
    assert records[0].lr == records[1].lr == records[2].lr != records[3].lr
    assert not torch.equal(model.weight, before)
