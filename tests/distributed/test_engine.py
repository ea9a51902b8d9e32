"""The engine that ds_parity.initialize returns: what goes in, what comes back, and what stays DeepSpeed's own."""

import json
from argparse import Namespace
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.trace import read_trace
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def bare_without_the_key(folder):
    plain = {**config(2), "train_batch_size": 2}
    del plain["gradient_accumulation_passes"]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    returned = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=plain)
    return {"bare": type(returned[0]) is deepspeed.DeepSpeedEngine, "length": len(returned)}


def test_without_the_key_the_bare_engine_comes_back(two_ranks):
    assert two_ranks.of(bare_without_the_key) == {"bare": True, "length": 4}


@on_two_ranks.first  # DeepSpeed's data loader forks workers
def unchanged_loop(folder):
    """DeepSpeed's own loop, arguments, data loader and callables, with no key of ds_parity in it."""
    data = [(torch.full((4,), float(i)), torch.tensor(1.0)) for i in range(16)]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    engine, optimizer, loader, scheduler = ds_parity.initialize(
        args=Namespace(local_rank=dist.get_rank(), deepspeed_config=None),
        model=model,
        model_parameters=model.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        training_data=data,
        config={k: v for k, v in config(2, passes=4).items() if k not in ("optimizer", "scheduler")},
    )
    boundaries = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(engine(x).squeeze(-1), y)
        engine.backward(loss)
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    return {
        "isinstance": isinstance(engine, deepspeed.DeepSpeedEngine),
        "boundaries": boundaries,
        "lr": scheduler.get_last_lr(),
        "steps": engine.global_steps,
        "optimizer": optimizer is engine.optimizer,
    }


def test_an_unchanged_deepspeed_loop_runs(two_ranks):
    result = two_ranks.of(unchanged_loop)
    assert result["isinstance"]
    assert result["optimizer"]
    assert result["boundaries"] == [False, True] * 4
    assert result["steps"] == 4
    assert result["lr"] == pytest.approx([0.1**5])


@on_two_ranks
def schedulers_of_another_optimizer(folder):
    """By stage and by what is given: what is raised, if anything."""

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def answered(stage, made, given):
        model = torch.nn.Linear(4, 1)
        own, another = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
        schedulers = {
            "right": schedule,
            "wrong": lambda optimizer: schedule(another),
            "wrong on one rank": lambda optimizer: schedule(another if dist.get_rank() else optimizer),
            "right instance": schedule(own),
            "wrong instance": schedule(another),
        }
        optimizers = {"instance": own, "function": lambda parameters: own, "section": None}
        section = {} if made == "section" else {"optimizer", "scheduler"}
        return refusal(
            lambda: ds_parity.initialize(
                model=model,
                model_parameters=None if made == "instance" else model.parameters(),
                optimizer=optimizers[made],
                lr_scheduler=schedulers[given],
                config={key: value for key, value in config(stage, passes=4).items() if key not in section},
            )
        )

    return {
        f"{stage} {made} {given}": from_all(answered(stage, made, given))
        for stage in STAGES
        for made, given in [
            *product(("instance", "function", "section"), ("right", "wrong")),
            ("function", "right instance"),
            ("function", "wrong instance"),
            ("instance", "wrong on one rank"),
        ]
    }


@pytest.mark.parametrize("made", ["instance", "function", "section"])
def test_a_function_that_schedules_another_optimizer_is_refused_on_every_rank(two_ranks, made, stage):
    found = two_ranks.of(schedulers_of_another_optimizer)
    assert found[f"{stage} {made} right"] == ["nothing was raised"] * 2
    for said in found[f"{stage} {made} wrong"]:
        assert said.startswith("ConfigError: lr_scheduler= is a function that has made a ExponentialLR over another")


def test_a_function_that_schedules_another_optimizer_on_one_rank_ends_both(two_ranks, stage):
    told, said = two_ranks.of(schedulers_of_another_optimizer)[f"{stage} instance wrong on one rank"]
    wrong = "ConfigError: lr_scheduler= is a function that has made a ExponentialLR over another optimizer (Adam) than"
    assert said.startswith(wrong)
    assert told.startswith(f"RankDesyncError: this rank stops because others did: rank 1 raised {wrong}")


def test_a_scheduler_is_held_to_the_optimizer_that_a_function_makes(two_ranks, stage):
    found = two_ranks.of(schedulers_of_another_optimizer)
    assert found[f"{stage} function right instance"] == ["nothing was raised"] * 2
    for said in found[f"{stage} function wrong instance"]:
        assert "than the one that the function in optimizer= has made" in said


@on_two_ranks
def configuration_by_arguments(folder):
    """`--deepspeed_config FILE`, as deepspeed.add_config_arguments gives it."""
    path = Path(f"{folder}-{dist.get_rank()}.json")
    path.write_text(json.dumps(config(1, passes=4)))
    given = Namespace(local_rank=dist.get_rank(), deepspeed_config=str(path))
    model = torch.nn.Linear(4, 1)
    engine, *_ = ds_parity.initialize(args=given, model=model, model_parameters=model.parameters())
    return {"target": engine.window.target, "args": given.deepspeed_config == str(path)}


def test_the_configuration_may_come_with_the_arguments_which_stay_as_they_are(two_ranks):
    assert two_ranks.of(configuration_by_arguments) == {"target": 4, "args": True}


@on_two_ranks
def proxy_methods(folder):
    engine = build(config(1, passes=4))
    kept = [engine.to(engine.device), engine.apply(lambda module: None), engine.requires_grad_(True)]
    return {"kept": [returned is engine for returned in kept], "weights": engine.module is engine.__wrapped__.module}


def test_methods_that_return_the_module_return_the_proxy(two_ranks):
    assert two_ranks.of(proxy_methods) == {"kept": [True] * 3, "weights": True}


@on_two_ranks
def torch_schedulers(folder):
    """Nominal progress under uneven windows: fractional for LambdaLR, whole steps for the others, DeepSpeed's own."""
    kinds = {
        "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step),
        "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    }
    results = {}
    for name, kind in kinds.items():
        extended = {k: v for k, v in config(2, passes=4, lr_progress="rollout").items() if k != "scheduler"}
        engine = build(extended, lr_scheduler=kind)
        rates = []
        for rollouts in (3, 3, 3, 1):
            one_pass(engine, 1, rollouts=rollouts)
            rates.append(engine.get_lr()[0] / 0.05)
        results[name] = rates
    extended = config(2, passes=4, lr_progress="rollout")
    engine = build(extended)
    for rollouts in (3, 3, 3, 1):
        one_pass(engine, 1, rollouts=rollouts)
    results["deepspeed"] = engine.lr_scheduler.last_batch_iteration
    return results


class TestNominalProgress:
    def test_is_fractional_for_lambda_lr(self, two_ranks):
        """Windows of 6, 6, 6 and 2 rollouts towards 4: progress 1.5, 3, 4.5, 5."""
        assert two_ranks.of(torch_schedulers)["lambda"] == pytest.approx([2.5, 4.0, 5.5, 6.0])

    def test_takes_whole_steps_and_carries_the_remainder_for_other_schedulers(self, two_ranks):
        assert two_ranks.of(torch_schedulers)["step"] == pytest.approx([2**-1, 2**-3, 2**-4, 2**-5])

    def test_stands_one_behind_for_deepspeed_schedulers(self, two_ranks):
        assert two_ranks.of(torch_schedulers)["deepspeed"] == 4


@on_two_ranks
def trace_key(folder):
    path = f"{folder}/training.jsonl"
    engine = build(config(2, passes=4, trace=path))
    for index in range(4):
        one_pass(engine, index)
    last = engine.last_step.model_dump()
    return {"path": path, "last": last}


def test_the_trace_key_leaves_a_trace(two_ranks):
    result = two_ranks.of(trace_key)
    trace = read_trace(result["path"])
    assert [step.rollouts for step in trace.steps] == [4, 4]
    assert trace.header.engine == "ds_parity"
    last = trace.steps[-1].model_dump()
    assert {**last, "lr": list(last["lr"])} == result["last"]
