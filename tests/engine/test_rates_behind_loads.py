"""What a load of the scheduler, or of the optimizer, alone leaves in the groups, with torch's own load in its place."""

import copy
import gc
import logging
import os
import subprocess
import sys
import weakref
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim import lr_scheduler

from ds_parity.engine.internals.rates_behind_loads import (
    Standing,
    await_a_loop,
    follow_a_loop,
    follow_the_schedule,
    moved_by_the_schedule,
    state_of_schedule,
)

BOTH = ("scheduler", "optimizer")


class Own:
    """Multiplies the rate that it finds, and saves no rate."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def one_cycle(highest):
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, highest, total_steps=9)


def engine_of(made, **options):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.05}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 0.1, **options})
    return SimpleNamespace(optimizer=optimizer, lr_scheduler=None if made is None else made(optimizer))


def stepped(engine, steps):
    found = []
    for _ in range(steps):
        found.append([(round(float(one["lr"]), 9), one["betas"]) for one in engine.optimizer.param_groups])
        engine.optimizer.step()
        engine.lr_scheduler.step()
    return found


def loaded(engine, saved, part, *, told=True):
    before = moved_by_the_schedule(engine, whatever_moves=True)
    one = "lr_scheduler" if part == "scheduler" else "optimizer"
    getattr(engine, one).load_state_dict(copy.deepcopy(getattr(saved, one).state_dict()))
    kept = moved_by_the_schedule(saved) if told else None
    follow_the_schedule(engine, before, kept, scheduler=part == "scheduler", optimizer=part == "optimizer")
    return engine


def halved(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_a_schedule_that_is_not_loaded_begins_with_its_own_bounds():
    """OneCycleLR keeps them in the groups, which are loaded, and cycles a beta there."""
    saved = engine_of(one_cycle(0.1))
    stepped(saved, 3)
    engine = loaded(engine_of(one_cycle(0.2)), saved, "optimizer")
    assert stepped(engine, 5) == stepped(engine_of(one_cycle(0.2)), 5)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("made", [halved, lambda it: lr_scheduler.CosineAnnealingLR(it, 7)])
def test_each_group_has_the_rate_of_the_schedule_that_is_loaded(made, told):
    saved = engine_of(made)
    stepped(saved, 3)
    assert stepped(loaded(engine_of(made), saved, "scheduler", told=told), 4) == stepped(saved, 4)


class InATuple(Own):
    """Saves what is no mapping."""

    def state_dict(self):
        return (self.steps,)

    def load_state_dict(self, state):
        (self.steps,) = state


def lookahead(optimizer):
    """DeepSpeed's, whose rates are a function of its step and of the configuration."""
    return WarmupLR(optimizer, warmup_min_lr=0.0, warmup_max_lr=[0.1, 0.2], warmup_num_steps=9, warmup_type="linear")


@pytest.mark.parametrize("made", [one_cycle(0.1), Own, InATuple, lookahead])
def test_what_schedulers_move_is_that_of_the_checkpoint(made):
    """Also a beta that is cycled, and the rate of a scheduler that saves none."""
    saved = engine_of(made)
    stepped(saved, 3)
    assert stepped(loaded(engine_of(made), saved, "scheduler"), 4) == stepped(saved, 4)


def test_a_rate_that_is_a_tensor_stays_one():
    saved, engine = (engine_of(halved, lr=torch.tensor(0.1), foreach=False) for _ in range(2))
    stepped(saved, 3)
    rate = engine.optimizer.param_groups[0]["lr"]
    loaded(engine, saved, "scheduler")
    assert engine.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.0125)


def test_a_rate_that_was_saved_as_a_tensor_is_a_number_where_it_was_one():
    """torch's optimizers refuse a tensor in some of their ways (foreach)."""
    saved, engine = engine_of(halved, lr=torch.tensor(0.1), foreach=False), engine_of(halved)
    stepped(saved, 3)
    loaded(engine, saved, "scheduler")
    rate = engine.optimizer.param_groups[0]["lr"]
    assert (type(rate), rate) == (float, pytest.approx(0.0125))


@pytest.mark.parametrize("made", [Own, InATuple])
def test_a_scheduler_that_saves_no_rate_is_told_of(made, caplog):
    """Behind a checkpoint of bare DeepSpeed."""
    saved, engine = engine_of(made), engine_of(made)
    stepped(saved, 3)
    with caplog.at_level(logging.WARNING, "ds_parity"):
        loaded(engine, saved, "scheduler", told=False)
    assert f"nor the state of the scheduler {made.__name__} has a rate for each parameter group" in caplog.text
    assert engine.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("part", BOTH)
def test_without_a_scheduler_rates_are_as_they_were_loaded(part, caplog):
    engine = engine_of(None)
    before = moved_by_the_schedule(engine, whatever_moves=True)
    engine.optimizer.param_groups[0]["lr"] = 7.0
    follow_the_schedule(engine, before, None, scheduler=part == "scheduler", optimizer=part == "optimizer")
    assert engine.optimizer.param_groups[0]["lr"] == 7.0
    assert not caplog.text


def test_a_load_of_both_leaves_what_was_loaded():
    engine = engine_of(halved)
    before = moved_by_the_schedule(engine, whatever_moves=True)
    engine.optimizer.param_groups[0]["lr"] = 7.0
    follow_the_schedule(engine, before, before, scheduler=True, optimizer=True)
    assert engine.optimizer.param_groups[0]["lr"] == 7.0


def test_what_another_scheduler_has_cycled_stays_as_it_is_here():
    saved, engine = engine_of(one_cycle(0.1)), engine_of(halved)
    stepped(saved, 3)
    before = moved_by_the_schedule(engine, whatever_moves=True)
    follow_the_schedule(engine, before, moved_by_the_schedule(saved), scheduler=True, optimizer=False)
    assert [group["betas"] for group in engine.optimizer.param_groups] == [(0.9, 0.999)] * 2
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2)) for _ in range(2)], lr=0.1, momentum=0.9)
    sgd.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    engine = SimpleNamespace(optimizer=sgd, lr_scheduler=one_cycle(0.2)(sgd))
    follow_the_schedule(
        engine,
        moved_by_the_schedule(engine, whatever_moves=True),
        moved_by_the_schedule(saved),
        scheduler=True,
        optimizer=False,
    )
    assert not any("betas" in group for group in sgd.param_groups)


@pytest.mark.parametrize("made", [halved, lookahead])
def test_what_another_scheduler_has_cycled_is_not_loaded_with_the_optimizer(made):
    saved = engine_of(one_cycle(0.1))
    stepped(saved, 3)
    engine = loaded(engine_of(made), saved, "optimizer")
    assert stepped(engine, 4) == stepped(engine_of(made), 4)


@pytest.mark.parametrize(("part", "second"), [("scheduler", 0.99), ("optimizer", 0.9)])
def test_the_second_beta_goes_with_the_optimizer(part, second):
    """OneCycleLR cycles the first one."""
    saved, engine = engine_of(one_cycle(0.1), betas=(0.7, 0.9)), engine_of(one_cycle(0.1), betas=(0.8, 0.99))
    stepped(saved, 3)
    first = (saved if part == "scheduler" else engine).optimizer.param_groups[0]["betas"][0]
    loaded(engine, saved, part)
    assert [group["betas"] for group in engine.optimizer.param_groups] == [(first, second)] * 2


def test_a_rate_that_a_loop_has_moved_beside_the_schedule_is_loaded():
    saved, engine = engine_of(halved), engine_of(halved)
    stepped(saved, 2)
    for group in saved.optimizer.param_groups:
        group["lr"] *= 0.1
    loaded(engine, saved, "scheduler")
    assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([0.0025, 0.00125])


class Noting(Own):
    """Keeps something else under the name by which torch's schedulers keep rates."""

    noted = None

    def state_dict(self):
        return {"steps": self.steps, "_last_lr": self.noted}


@pytest.mark.parametrize(
    "noted", [0.1, {"policy": 0.1}, "ab", [None, None], torch.tensor(0.1), torch.tensor([0.7, 0.7]), [0.7]]
)
@pytest.mark.parametrize("told", [True, False])
def test_a_note_of_a_scheduler_is_no_rate_where_the_checkpoint_tells_one_or_it_is_none(noted, told, monkeypatch):
    monkeypatch.setattr(Noting, "noted", noted)
    saved, engine = engine_of(Noting), engine_of(Noting)
    stepped(saved, 3)
    loaded(engine, saved, "scheduler", told=told)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    two_rates = isinstance(noted, torch.Tensor) and noted.dim() == 1
    assert rates == pytest.approx([0.0125, 0.00625] if told else [0.7, 0.7] if two_rates else [0.1, 0.05])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler([halved(optimizer), lr_scheduler.ConstantLR(optimizer, 0.5, 2)])


class InNumpy(Own):
    """Counts its steps by numpy, and keeps a number that equals nothing."""

    def state_dict(self):
        return {"steps": np.int64(self.steps), "rows": np.arange(self.steps), "best": float("nan")}


def state_of(engine):
    return copy.deepcopy(engine.lr_scheduler.state_dict())


def without_the_scheduler(engine, saved, *parts, taken=False, left=False, tells_its_rates=False):
    """Load these parts, and let a loop do the rest; what it knows of the scheduler."""
    before, own = moved_by_the_schedule(engine, whatever_moves=True), engine.lr_scheduler
    if taken:
        engine.lr_scheduler = None
    if "optimizer" in parts:
        engine.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    rates = moved_by_the_schedule(saved)
    follow_the_schedule(engine, before, rates, scheduler=False, optimizer="optimizer" in parts)
    state = state_of_schedule(saved.lr_scheduler)
    await_a_loop(engine, own, left, state, rates, tells_its_rates=tells_its_rates)
    return own


@pytest.mark.parametrize("parts", [(), ("optimizer",)])
@pytest.mark.parametrize("order", ["before", "behind", "taken away", "taken away since"])
@pytest.mark.parametrize(
    "made",
    [
        halved,
        one_cycle(0.1),
        lookahead,
        lambda it: lr_scheduler.CosineAnnealingLR(it, 7),
        Own,
        InATuple,
        InNumpy,
        chained,
    ],
)
def test_a_loop_that_loads_the_scheduler_itself_goes_on_as_if_all_was_loaded(made, order, parts):
    saved, engine = engine_of(made), engine_of(made)
    stepped(saved, 3)
    standing = Standing(engine.lr_scheduler)
    if order == "before":
        engine.lr_scheduler.load_state_dict(state_of(saved))
    left = standing.has_left(engine.lr_scheduler)
    assert left == (order == "before")
    own = without_the_scheduler(engine, saved, *parts, taken=order == "taken away", left=left)
    if order == "taken away since":
        engine.lr_scheduler = None
    if order != "before":
        own.load_state_dict(state_of(saved))
    assert follow_a_loop(engine)
    engine.lr_scheduler = own
    assert stepped(engine, 4) == stepped(saved, 4)


def warm_up(optimizer):
    return WarmupLR(optimizer, warmup_max_lr=0.1, warmup_num_steps=9)


@pytest.mark.parametrize(
    "made", [halved, one_cycle(0.1), lambda it: lr_scheduler.CosineAnnealingLR(it, 7), chained, warm_up]
)
def test_so_does_one_that_has_taken_steps_and_loads_the_scheduler_before(made):
    saved, engine = engine_of(made), engine_of(made)
    stepped(saved, 3)
    stepped(engine, 5)
    standing = Standing(None)
    standing.stepped(engine.lr_scheduler)
    assert standing.has_left(engine.lr_scheduler) is False
    engine.lr_scheduler.load_state_dict(state_of(saved))
    without_the_scheduler(engine, saved, "optimizer", left=standing.has_left(engine.lr_scheduler))
    assert follow_a_loop(engine)
    assert stepped(engine, 4) == stepped(saved, 4)


@pytest.mark.parametrize("made", [halved, one_cycle(0.1), chained, lookahead])
def test_so_does_one_that_loads_the_scheduler_before_it_builds_the_engine(made):
    saved, engine = engine_of(made), engine_of(made)
    stepped(saved, 3)
    engine.lr_scheduler.load_state_dict(state_of(saved))
    standing = Standing(engine.lr_scheduler)
    without_the_scheduler(engine, saved, "optimizer", left=standing.has_left(engine.lr_scheduler))
    assert follow_a_loop(engine)
    standing.loaded(engine.lr_scheduler)
    assert standing.has_left(engine.lr_scheduler) is False
    assert stepped(engine, 4) == stepped(saved, 4)


def test_one_that_was_stepped_before_its_engine_was_built_has_its_own_rates():
    """DeepSpeed's schedulers save a position alone, which does not tell whether it was loaded."""
    saved, engine = engine_of(warm_up), engine_of(lookahead)
    stepped(saved, 3)
    stepped(engine, 3)
    due = state_of(engine)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    standing = Standing(engine.lr_scheduler)
    assert state_of(saved) == due
    assert standing.tells_its_rates(engine.lr_scheduler)
    left = standing.has_left(engine.lr_scheduler)
    without_the_scheduler(engine, saved, "optimizer", left=left, tells_its_rates=True)
    follow_a_loop(engine)
    assert [group["lr"] for group in engine.optimizer.param_groups] == rates
    standing.stepped(engine.lr_scheduler)
    assert not standing.tells_its_rates(engine.lr_scheduler)


@pytest.mark.parametrize("made", [halved, warm_up, one_cycle(0.3), lambda it: lr_scheduler.LambdaLR(it, lambda _: 1.0)])
def test_rates_that_a_loop_has_set_stay_where_both_stand_alike_and_nobody_loads(made):
    saved, engine = engine_of(one_cycle(0.1) if made is not halved else halved), engine_of(made)
    stepped(saved, 3)
    stepped(engine, 3)
    standing = Standing(None)
    standing.stepped(engine.lr_scheduler)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.5
    without_the_scheduler(engine, saved, "optimizer", left=standing.has_left(engine.lr_scheduler))
    assert not follow_a_loop(engine)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 0.5]


def test_what_deepspeed_has_loaded_was_loaded_by_no_loop():
    saved, other, engine = engine_of(warm_up), engine_of(warm_up), engine_of(warm_up)
    stepped(saved, 3)
    stepped(other, 3)
    standing = Standing(engine.lr_scheduler)
    engine.lr_scheduler.load_state_dict(state_of(other))
    standing.loaded(engine.lr_scheduler)
    without_the_scheduler(engine, saved, "optimizer", left=standing.has_left(engine.lr_scheduler))
    assert not follow_a_loop(engine)


def test_a_save_does_not_end_the_wait_for_a_loop():
    saved, engine = engine_of(halved), engine_of(halved)
    stepped(saved, 3)
    without_the_scheduler(engine, saved, "optimizer")
    assert not follow_a_loop(engine, saves=True)
    engine.lr_scheduler.load_state_dict(state_of(saved))
    assert follow_a_loop(engine, saves=True)
    assert not follow_a_loop(engine)
    assert stepped(engine, 4) == stepped(saved, 4)


@pytest.mark.parametrize("made", [halved, warm_up, Own])
def test_rates_that_the_checkpoint_does_not_tell_are_those_of_the_loaded_scheduler(made, caplog):
    saved, engine = engine_of(made, lr=0.8), engine_of(made, lr=0.8)
    stepped(saved, 3)
    await_a_loop(engine, engine.lr_scheduler, False, state_of_schedule(saved.lr_scheduler), None)
    engine.lr_scheduler.load_state_dict(state_of(saved))
    assert follow_a_loop(engine)
    if made is Own:
        assert "Own has a rate for each parameter group" in caplog.text
    else:
        assert stepped(engine, 3) == stepped(saved, 3)


def fast_forward(engine, saved):
    for _ in range(3):
        engine.optimizer.step()
        engine.lr_scheduler.step()


def begun_anew(engine, saved):
    engine.lr_scheduler.load_state_dict(state_of(engine_of(halved)))


def in_its_place(engine, saved):
    engine.lr_scheduler = lr_scheduler.StepLR(engine.optimizer, 2, 0.5)


def set_by_the_loop(engine, saved):
    engine.lr_scheduler.load_state_dict(state_of(saved))
    engine.optimizer.param_groups[0]["lr"] = 7.0


@pytest.mark.parametrize("does", [None, fast_forward, begun_anew, in_its_place, set_by_the_loop])
def test_a_loop_that_does_anything_else_has_the_rates_that_it_makes(does):
    saved, engine = engine_of(halved, lr=0.8), engine_of(halved)
    stepped(saved, 3)
    without_the_scheduler(engine, saved, "optimizer")
    if does is not None:
        does(engine, saved)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    assert follow_a_loop(engine) == (does is set_by_the_loop)
    assert [group["lr"] for group in engine.optimizer.param_groups] == rates


def test_rates_are_put_back_before_one_step_alone():
    saved, engine = engine_of(halved), engine_of(halved)
    stepped(saved, 3)
    without_the_scheduler(engine, saved, "optimizer")
    follow_a_loop(engine)
    engine.lr_scheduler.load_state_dict(state_of(saved))
    assert not follow_a_loop(engine)
    assert engine.optimizer.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_that_does_not_tell_of_the_scheduler_changes_nothing():
    saved, engine = engine_of(halved), engine_of(halved)
    stepped(saved, 3)
    await_a_loop(engine, engine.lr_scheduler, False, None, moved_by_the_schedule(saved))
    engine.lr_scheduler.load_state_dict(state_of(saved))
    assert not follow_a_loop(engine)


class Still(Own):
    """Saves what no step moves."""

    def state_dict(self):
        return {"factor": 0.5}

    def load_state_dict(self, state):
        """Take nothing."""


@pytest.mark.parametrize("made", [Still, Own])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_schedule_that_stands_there_and_that_nobody_has_loaded_stays_its_own(made, steps, caplog):
    saved, engine = engine_of(made, lr=0.8), engine_of(made)
    stepped(saved, 3)
    standing = Standing(engine.lr_scheduler)
    if steps:
        stepped(engine, steps)
        standing.stepped(engine.lr_scheduler)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    without_the_scheduler(engine, saved, "optimizer", left=standing.has_left(engine.lr_scheduler))
    assert not follow_a_loop(engine)
    assert [group["lr"] for group in engine.optimizer.param_groups] == rates
    # In a used engine nothing tells whether it was loaded.
    assert (f"{made.__name__} stands where that of the checkpoint did" in caplog.text) == (steps == 3)


def test_a_loop_may_change_a_setting_in_the_state_that_it_loads():
    saved, engine, due = engine_of(halved), engine_of(halved), engine_of(halved)
    for one in (saved, due):
        stepped(one, 3)
    without_the_scheduler(engine, saved, "optimizer")
    for one in (engine, due):
        one.lr_scheduler.load_state_dict({**state_of(saved), "gamma": 0.9})
    assert follow_a_loop(engine)
    assert stepped(engine, 3) == stepped(due, 3)


class Endless(Own):
    """Has a state that holds itself."""

    def state_dict(self):
        state = {"steps": self.steps}
        state["own"] = state
        return state


class OfAnyKind(Own):
    """Has a state of what is neither a number nor a text, and of what can't be told."""

    def state_dict(self):
        large, kept = torch.full((2000,), self.steps), SimpleNamespace(names={"warm", "cold", str(self.steps)})
        return {"steps": Fraction(self.steps), "kept": kept, "large": large, "by": lambda: self.steps}

    def load_state_dict(self, state):
        self.steps = int(state["steps"])


class Bare(Own):
    """Has a number as its state, which is 0 at first."""

    def state_dict(self):
        return self.steps

    def load_state_dict(self, state):
        self.steps = state


@pytest.mark.parametrize("order", ["before", "behind"])
@pytest.mark.parametrize("made", [Endless, OfAnyKind, Bare])
def test_a_state_may_be_of_any_kind(made, order):
    saved, engine = engine_of(made), engine_of(made)
    standing = Standing(engine.lr_scheduler)
    stepped(saved, 3)
    if order == "before":
        engine.lr_scheduler.load_state_dict(saved.lr_scheduler.state_dict())
    left = standing.has_left(engine.lr_scheduler)
    assert left == (order == "before")
    without_the_scheduler(engine, saved, "optimizer", left=left)
    if order == "behind":
        engine.lr_scheduler.load_state_dict(saved.lr_scheduler.state_dict())
    assert follow_a_loop(engine)
    assert stepped(engine, 2) == stepped(saved, 2)


def test_a_set_has_no_order():
    """That of its names is another one in each process."""
    states = []
    for seed in "12":
        code = (
            "from types import SimpleNamespace as One; from ds_parity.engine.internals import rates_behind_loads as it;"
            "print(it.state_in_checkpoint({'lr_scheduler': {'seen': set('abcdefg'), 'kept': One(of=set('abcdefg'))}}))"
        )
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        states.append(run.stdout.splitlines()[-1])
    assert states[0] == states[1]
    assert "'g'" in states[0]


class Raises(Own):
    """Has no state."""

    def state_dict(self):
        raise ValueError


def test_a_scheduler_without_a_state_is_nothing_to_compare():
    assert state_of_schedule(engine_of(Raises).lr_scheduler) is None


def test_what_is_remembered_does_not_keep_an_engine():
    saved, engine = engine_of(halved), engine_of(halved)
    without_the_scheduler(engine, saved, "optimizer")
    optimizer = weakref.ref(engine.optimizer)
    del engine
    gc.collect()
    assert optimizer() is None


class Odd(Own):
    """Uses a name of torch's schedulers for something else."""

    def state_dict(self):
        return {"last_epoch": self.steps, "_last_lr": "halved", "own": self.optimizer.param_groups[0]["lr"]}

    def load_state_dict(self, state):
        self.steps = state["last_epoch"]


def test_a_name_of_torchs_schedulers_may_mean_something_else():
    saved, engine = engine_of(Odd), engine_of(Odd)
    stepped(saved, 3)
    without_the_scheduler(engine, saved, "optimizer")
    engine.lr_scheduler.load_state_dict(state_of(saved))
    assert not follow_a_loop(engine)
