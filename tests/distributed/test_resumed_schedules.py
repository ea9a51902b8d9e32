"""Learning rates behind a load of the scheduler's state, or of the optimizer's, alone: they follow the schedule."""

import deepspeed
import pytest
import torch
from torch.optim import lr_scheduler

import ds_parity
from ds_parity.errors import CheckpointError
from tests.distributed.engines import from_all, listen
from tests.distributed.sets import at_length_on_two_ranks, by_length, either, on_two_ranks
from tests.distributed.test_pipelines import alone_in_the_process, micro_batches, squares

pytestmark = pytest.mark.ranks

RATE = 0.02


def warm_up(optimizer):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.StepLR(optimizer, 2)], milestones=[3])


def _halved(step):
    return 0.5**step


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7, 0.001),
    "SequentialLR": warm_up,
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, _halved),
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 2},
    "WarmupLR": {"warmup_num_steps": 2},
    "none": None,
}
# By name: a scheduler, and the ZeRO stage, or "pipeline" or "tensor", which are on ZeRO 1.
CASES = {f"{name} on 1": (name, 1) for name in SCHEDULERS if name != "WarmupLR"}
CASES |= {f"StepLR on {stage}": ("StepLR", stage) for stage in (0, 2, 3)}
CASES["StepLR by a tensor"] = ("StepLR", "tensor")
CASES["StepLR in a pipeline"] = ("StepLR", "pipeline")
CASES["WarmupCosineLR in a pipeline"] = ("WarmupCosineLR", "pipeline")


def build(name, stage, by=ds_parity.initialize, **ours):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)]
    piped = stage == "pipeline"
    model = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=squares) if piped else torch.nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage if isinstance(stage, int) else 1},
    }
    if by is ds_parity.initialize:
        config |= {"ds_parity": {"boundary": "caller"}} if piped else {"gradient_accumulation_passes": 2}
        config["ds_parity"] = config.get("ds_parity", {}) | ours
    made = SCHEDULERS[name]
    if isinstance(made, dict):
        config["scheduler"], made = {"type": name, "params": made}, None
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(RATE) if stage == "tensor" else RATE)
    return by(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=None if made is None else made(optimizer),
    )[0]


def train(engine, windows):
    """The rates of some steps."""
    rates = []
    for number in windows:
        if isinstance(engine.module, deepspeed.PipelineModule):
            rates.append(engine.train_window(micro_batches(engine, number, [[2, 1]])).lr[0])
        else:
            x = torch.randn(1, 6, generator=torch.Generator().manual_seed(number)).to(engine.device)
            engine.backward(engine(x).pow(2).mean(), rollouts=1)
            engine.step()
            rates.append(engine.last_step.lr[0])
    return [round(rate, 9) for rate in rates]


def behind_loads(cases, folder):
    """By case: rates from the start, of the run that goes on, and behind loads of the scheduler and optimizer alone."""
    results = {}
    for case in cases:
        name, stage = CASES[case]
        saving = build(name, stage)
        begins = train(saving, range(3))
        saving.save_checkpoint(f"{folder}/{case}")
        found = [train(saving, range(3, 6))]
        for option in ("load_optimizer_states", "load_lr_scheduler_states"):
            deepspeed.utils.groups.mpu = None
            engine = build(name, stage)
            engine.load_checkpoint(f"{folder}/{case}", **{option: False})
            found.append(train(engine, range(3, 6)))
        results[case] = from_all([begins, *found])
        deepspeed.utils.groups.mpu = None
    return results


OFTEN = ("StepLR on 1", "StepLR on 3", "StepLR in a pipeline")
SELDOM = tuple(case for case in CASES if case not in OFTEN)


@on_two_ranks
@alone_in_the_process
def rates_behind_loads(folder):
    return behind_loads(OFTEN, folder)


@at_length_on_two_ranks
@alone_in_the_process
def rates_behind_loads_at_length(folder):
    return behind_loads(SELDOM, folder)


@pytest.mark.parametrize("case", by_length(OFTEN, SELDOM, "two_ranks"))
def test_rates_follow_the_schedule_whatever_is_loaded_of_it(request, case):
    found = either(request, rates_behind_loads, rates_behind_loads_at_length, seldom=case in SELDOM)
    for begins, goes_on, behind_scheduler, behind_optimizer in found[case]:
        assert behind_scheduler == goes_on
        assert behind_optimizer == begins
        assert "none" in case or begins != goes_on


# By name: the scheduler that saves, the one that loads its state, where, and whether the rates may be those of neither.
CHANGED = {
    "StepLR, then CosineAnnealingLR": ("StepLR", "CosineAnnealingLR", 1, True),
    "CosineAnnealingLR, then StepLR in a pipeline": ("CosineAnnealingLR", "StepLR", "pipeline", True),
    "WarmupCosineLR, then StepLR": ("WarmupCosineLR", "StepLR", 0, True),
    "StepLR, then StepLR": ("StepLR", "StepLR", 3, False),
    "WarmupLR, then WarmupCosineLR": ("WarmupLR", "WarmupCosineLR", 2, False),
    "none, then StepLR": ("none", "StepLR", 1, None),
}


@on_two_ranks
@alone_in_the_process
def warned_of_other_schedulers(folder):
    results = {}
    for case, (name, other, stage, _) in CHANGED.items():
        saving = build(name, stage)
        train(saving, range(2))
        saving.save_checkpoint(f"{folder}/{case}")
        found = []
        for option in (True, False):
            deepspeed.utils.groups.mpu = None
            engine = build(other, stage)
            text, stop = listen()
            try:
                engine.load_checkpoint(f"{folder}/{case}", load_lr_scheduler_states=option)
                found.append(f"saved with the LR scheduler {name}, and {other} has loaded its state" in text.getvalue())
            except CheckpointError:
                found.append(None)
            stop()
        results[case] = from_all(found)
        deepspeed.utils.groups.mpu = None
    return results


@pytest.mark.parametrize("case", CHANGED)
def test_the_state_of_another_kind_of_scheduler_is_warned_of(two_ranks, case):
    name, other, _, warned = CHANGED[case]
    for with_its_state, without in two_ranks.of(warned_of_other_schedulers)[case]:
        assert with_its_state is warned
        assert without is False, f"{name} was asked for by nobody, and {other} begins"


# By name: a scheduler, the stage, and what the schedule moves by.
OF_BARE = {
    "StepLR on 0": ("StepLR", 0, "optimizer_step"),
    "StepLR on 3, by rollouts": ("StepLR", 3, "rollout"),
    "CosineAnnealingLR on 1": ("CosineAnnealingLR", 1, "optimizer_step"),
    "LambdaLR on 2, by rollouts": ("LambdaLR", 2, "rollout"),
    "WarmupCosineLR on 1": ("WarmupCosineLR", 1, "optimizer_step"),
    "WarmupCosineLR on 2, by rollouts": ("WarmupCosineLR", 2, "rollout"),
    "StepLR in a pipeline": ("StepLR", "pipeline", "optimizer_step"),
    "WarmupCosineLR in a pipeline": ("WarmupCosineLR", "pipeline", "optimizer_step"),
}
ALONE = {"load_lr_scheduler_states": False}
NOTHING = {**ALONE, "load_optimizer_states": False}
# What is loaded, and when a loop loads the scheduler itself. Pipelines load no weights alone.
LOADS = [
    ({}, "not"),
    (ALONE, "behind"),
    (ALONE, "before"),
    (ALONE, "before, and weights between"),
    (ALONE, "behind a save"),
    (NOTHING, "behind"),
]


@on_two_ranks
@alone_in_the_process
def loaded_by_loops(folder):
    """By case: rates behind a load of the whole checkpoint of bare DeepSpeed, and behind loads by parts and a loop."""
    results = {}
    for case, (name, stage, progress) in OF_BARE.items():
        bare = build(name, stage, deepspeed.initialize)
        for number in range(3):
            if stage == "pipeline":
                bare.train_batch(iter([(torch.ones(1, 6), torch.ones(1, 1))]))
            else:
                bare.backward(bare(torch.ones(1, 6, device=bare.device)).pow(2).mean() * number)
                bare.step()
        bare.save_checkpoint(f"{folder}/{case}")
        state, found = bare.lr_scheduler.state_dict(), []
        for options, when in LOADS[: -1 if stage == "pipeline" else None]:
            deepspeed.utils.groups.mpu = None
            engine = build(name, stage, lr_progress=progress)
            if when.startswith("before"):
                engine.lr_scheduler.load_state_dict(state)
            if when == "before, and weights between" and stage != 3:
                engine.load_checkpoint(f"{folder}/{case}", load_module_only=True)
            engine.load_checkpoint(f"{folder}/{case}", **options)
            if when == "behind a save":
                engine.save_checkpoint(f"{folder}/again/{case}")
            if when.startswith("behind"):
                engine.lr_scheduler.load_state_dict(state)
            found.append(train(engine, range(3, 6)))
        results[case] = from_all(found)
        deepspeed.utils.groups.mpu = None
    return results


@pytest.mark.parametrize("case", OF_BARE)
def test_a_loop_may_load_the_scheduler_of_a_checkpoint_of_bare_deepspeed(two_ranks, case):
    for whole, *by_loops in two_ranks.of(loaded_by_loops)[case]:
        assert by_loops == [whole] * len(by_loops)
