"""Schedulers whose step() needs what only the loop knows: it is given, or the step is refused; never the batch size."""

import re

import pytest
import torch.distributed as dist
from torch.optim import lr_scheduler

from tests.distributed.cells import STAGES, config
from tests.distributed.engines import Batch, build, forward, from_all, refusal
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_loop_shapes import weights

pytestmark = pytest.mark.ranks
RATE = 0.01
PASSES = 5  # of one rollout on each rank: every second one reaches the target of 4, and the last window stays open
IMPROVING = {"metrics": 0.0}


class Increments(lr_scheduler.LRScheduler):
    """Megatron's: it counts samples, which DeepSpeed tells it."""

    def __init__(self, optimizer):
        self.taken = []
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, increment):
        self.taken.append(increment)

    def _initial_step(self):
        self._last_lr = self.get_lr()


class Broken(lr_scheduler.LambdaLR):
    """Its own fault is a TypeError."""

    def step(self, epoch=None):
        if self.last_epoch >= 0 and self._step_count:
            return None + 1
        return super().step(epoch)


class Handing:
    """Hands on what it is given, as a framework's wrapper does."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def step(self, *args, **kwargs):
        self.scheduler.step(*args, **kwargs)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def broken_on_one(optimizer):
    return (Broken if dist.get_rank() else lr_scheduler.LambdaLR)(optimizer, lambda epoch: 1.0)


def halving(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def engine_with(stage, scheduler, **extra):
    keys = config(stage, passes=4, **extra)
    keys["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    del keys["scheduler"]
    return build(keys, lr_scheduler=scheduler)


def run(engine, lr_kwargs, ends=None):
    """The learning rates behind each pass; `ends` is given to finish()."""
    rates = []
    for number in range(PASSES):
        engine.backward(forward(engine, 2 * number + dist.get_rank()), rollouts=1)
        engine.step(lr_kwargs=lr_kwargs(number))
        rates.append(engine.get_lr()[0])
    if ends is not None:
        engine.finish(**ends)
        rates.append(engine.get_lr()[0])
    return rates


@on_two_ranks
def schedulers(folder):
    results = {}
    for stage in STAGES:
        found = results[f"{stage}"] = {}
        engine = engine_with(stage, plateau)
        found["given"] = run(engine, lambda n: {"metrics": float(n)}, {"lr_kwargs": IMPROVING})
        engine.destroy()

        engine = engine_with(stage, plateau)
        begun = weights(engine)
        for _ in range(2):
            engine.backward(forward(engine, dist.get_rank()), rollouts=1)
            if engine.is_gradient_accumulation_boundary():
                found["not given"] = refusal(engine.step)
                found["not given, weights"] = weights(engine) == begun
                found["wrong name"] = refusal(lambda e=engine: e.step(lr_kwargs={"metric": 1.0}))
                found["no mapping"] = refusal(lambda e=engine: e.step(lr_kwargs=3.0))
                engine.step(lr_kwargs=IMPROVING)
            else:
                engine.step()
        found["given then"] = [engine.last_step.step, engine.get_lr()[0]]
        engine.backward(forward(engine, dist.get_rank()), rollouts=1)
        engine.step()
        found["finish"] = refusal(engine.finish)
        engine.finish(lr_kwargs=IMPROVING)
        found["finished"] = engine.last_step.step
        engine.destroy()

        engine = engine_with(stage, plateau)

        def through(engine=engine):
            for _ in engine.passes([Batch()]):
                engine.backward(forward(engine, dist.get_rank()))
                engine.step(lr_kwargs={"metrics": 1.0})

        found["passes"] = refusal(through)
        engine.finish(lr_kwargs=IMPROVING)
        found["passes, finished"] = engine.last_step.step
        engine.destroy()

        engine = engine_with(stage, halving)
        found["unwanted"] = refusal(lambda e=engine: run(e, lambda n: {"metrics": 1.0}))
        engine.destroy()
        engine = engine_with(stage, halving)
        found["wanted"] = run(engine, lambda n: {"epoch": 7} if n > 1 else None, {})
        engine.destroy()

        engine = engine_with(stage, Increments)
        run(engine, lambda n: None, {})
        found["increments"] = engine.lr_scheduler.taken
        engine.destroy()

        engine = engine_with(stage, Increments)
        engine.lr_scheduler = Handing(engine.lr_scheduler)
        run(engine, lambda n: None, {})
        found["handed on"] = engine.lr_scheduler.scheduler.taken
        engine.destroy()

        engine = engine_with(stage, halving, lr_progress="rollout")
        found["by rollout"] = refusal(lambda e=engine: run(e, lambda n: {"metrics": 1.0}))
        engine.destroy()
        found["by rollout, needs"] = refusal(lambda s=stage: engine_with(s, Increments, lr_progress="rollout"))

        engine = engine_with(stage, None, last_window="drop")
        engine.backward(forward(engine, dist.get_rank()), rollouts=1)
        engine.step()
        engine.optimizer.param_groups[0]["lr"] = RATE * (1 + dist.get_rank())
        found["apart, dropped"] = refusal(engine.finish)
        engine.destroy()

        engine = engine_with(stage, lambda optimizer: Broken(optimizer, lambda epoch: 1.0))
        found["broken"] = refusal(lambda e=engine: run(e, lambda n: None))
        engine.destroy()

        engine = engine_with(stage, broken_on_one)
        found["broken on one"] = refusal(lambda e=engine: run(e, lambda n: None))
        engine.destroy()
        if stage < 2:  # the others' next backward waits inside DeepSpeed on ZeRO 2 and 3, where nobody can tell them
            engine = engine_with(stage, broken_on_one, boundary="caller")
            found["broken on one, caller"] = refusal(lambda e=engine: run(e, lambda n: None))
            engine.destroy()

        engine = engine_with(stage, plateau)
        found["apart"] = refusal(
            lambda e=engine: run(
                e, lambda n: {"metrics": float(n if dist.get_rank() else -n)}, {"lr_kwargs": IMPROVING}
            )
        )
        found["apart, steps"] = engine.last_step.step
        engine.destroy()
        engine = engine_with(stage, None)
        engine.optimizer.param_groups[0]["lr"] = RATE * (1 + dist.get_rank())
        found["set apart"] = refusal(lambda e=engine: run(e, lambda n: None))
        engine.destroy()

        engine = engine_with(stage, plateau, boundary="caller")
        engine.backward(forward(engine, dist.get_rank()), rollouts=1)
        found["caller"] = refusal(engine.step)
        engine.step(lr_kwargs=IMPROVING)
        engine.backward(forward(engine, dist.get_rank()), rollouts=1)
        found["caller, finish"] = refusal(engine.finish)
        engine.finish(lr_kwargs=IMPROVING)
        found["caller, steps"] = engine.last_step.step
        engine.optimizer.param_groups[0]["lr"] = RATE * (1 + dist.get_rank())
        engine.backward(forward(engine, dist.get_rank()), rollouts=1)
        found["caller, apart"] = refusal(lambda e=engine: e.step(lr_kwargs={"metrics": 1.0}))
        engine.destroy()
    return from_all(results)


BROKEN = "step.* of the scheduler Broken has raised TypeError: unsupported operand"
NEEDS = r"ReduceLROnPlateau.step\(\) needs metrics: .*lr_kwargs={'metrics': \.\.\.}"
APART = (
    r"RankDesyncError: ranks differ in the learning rate of parameter group 0 \(rank 0 has .*; rank 1 has .*\). So the"
)
SAID = {
    "not given": rf"WindowError: step\(\) in window 0 was given no lr_kwargs, but {NEEDS}",
    "wrong name": r"WindowError: step\(\) in window 0 was given lr_kwargs with metric, but ReduceLROnPlateau.step\(\) "
    "takes metrics",
    "no mapping": r"lr_kwargs=3.0: must be a mapping",
    "finish": rf"WindowError: finish\(\) in window 1 was given no lr_kwargs, but {NEEDS}.* behind passes\(",
    "passes": rf"WindowError: finish\(\) in window 0 was given no lr_kwargs, but {NEEDS}",
    "unwanted": r"lr_kwargs with metrics, but StepLR.step\(\) takes epoch",
    "broken": "WindowError: step.* of the scheduler Broken has raised TypeError: unsupported operand",
    "broken on one": BROKEN,
    "by rollout": r"lr_kwargs with metrics, but StepLR.step\(\) takes epoch",
    "by rollout, needs": r"ConfigError: .*Increments, whose step\(\) needs increment and has no position",
    "apart, dropped": "^nothing was raised$",
    "apart": APART,
    "set apart": APART,
    "caller": rf"WindowError: step\(\) in window 0 was given no lr_kwargs, but {NEEDS}",
    "caller, finish": rf"WindowError: finish\(\) in window 1 was given no lr_kwargs, but {NEEDS}",
    "caller, apart": APART,
}
IS = {
    "given": [RATE, RATE, RATE, RATE / 2, RATE / 2, RATE / 2],
    "not given, weights": True,
    "given then": [1, RATE],
    "finished": 2,
    "passes, finished": 1,
    "wanted": [RATE, RATE / 2, RATE / 2, RATE / 2**7, RATE / 2**7, RATE / 2**8],
    "increments": [4, 4, 4],
    "handed on": [4, 4, 4],
    "apart, steps": 2,
    "caller, steps": 2,
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_scheduler_is_not_given_is_refused(two_ranks, stage, case):
    for found in two_ranks.of(schedulers):
        assert re.search(SAID[case], found[stage][case], re.DOTALL), found[stage][case]


@pytest.mark.parametrize("stage", ["0", "1"])
def test_what_is_raised_on_one_rank_is_told_where_the_caller_ends_windows(two_ranks, stage):
    for found in two_ranks.of(schedulers):
        assert re.search(BROKEN, found[stage]["broken on one, caller"]), found[stage]["broken on one, caller"]


@pytest.mark.parametrize("case", IS)
def test_what_a_scheduler_is_given_moves_it(two_ranks, stage, case):
    for found in two_ranks.of(schedulers):
        assert found[stage][case] == (pytest.approx(IS[case]) if isinstance(IS[case], list) else IS[case])
