"""A scheduler that a loop takes away from the engine and steps itself, as Lightning does: it stands where it would."""

import pytest
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim import lr_scheduler

from tests.distributed.cells import config
from tests.distributed.engines import build, forward, from_all
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
WINDOWS = 6
BY_THE_LOOP = ("kept, behind", "kept, before", "kept, by its own object", "kept, weights alone", "behind", "before")
BEGUN = "kept, never"
SCHEDULERS = {
    "a function of the step": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step by step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "DeepSpeed's": lambda optimizer: WarmupLR(optimizer, 0.0, 0.1, 10, "linear"),
}


def engine_with(scheduler):
    keys = config(2, passes=4, lr_progress="rollout")
    del keys["scheduler"]
    return build(keys, lr_scheduler=SCHEDULERS[scheduler])


def taken_from(engine):
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    return scheduler


def rates(engine, windows, scheduler=None, every=1):
    """The learning rate behind each window of five rollouts, a quarter more than asked; the loop steps a scheduler."""
    found = []
    for number in windows:
        engine.backward(forward(engine, 2 * number + dist.get_rank()), rollouts=2 + dist.get_rank())
        engine.step()
        if scheduler is not None and number % every == every - 1:
            scheduler.step()
        found.append(engine.optimizer.param_groups[0]["lr"])
    return found


def resumed(folder, scheduler):
    """Save behind three windows, go on for one, and load into the same engine and into a new one."""
    engine, found = engine_with(scheduler), {}
    own = taken_from(engine)
    rates(engine, range(3), own)
    engine.save_checkpoint(folder, tag="three", client_state={"of the loop": own.state_dict()})
    rates(engine, range(3, 4), own)
    for name, one in (("the same", engine), ("another", engine_with(scheduler))):
        if one is not engine:
            own = taken_from(one)
        _, client = one.load_checkpoint(folder, tag="three")
        own.load_state_dict(client["of the loop"])
        own.step()  # nothing has been consumed since
        found[name] = rates(one, range(3, WINDOWS), own)
        one.destroy()
    return found | {order: _resumed_by_the_loop(folder, scheduler, order) for order in (*BY_THE_LOOP, BEGUN)}


def _resumed_by_the_loop(folder, scheduler, order):
    """Load without the scheduler's state, which the loop loads itself; another state was loaded first."""
    engine = engine_with(scheduler)
    kept = order.startswith("kept")
    own = engine.lr_scheduler if kept else taken_from(engine)
    begun = own.state_dict()
    own = own.__wrapped__ if "object" in order else own
    options = {"load_lr_scheduler_states": False, "load_optimizer_states": "alone" not in order}
    _, client = engine.load_checkpoint(folder, tag="three", **options)
    if "before" in order:
        own.load_state_dict(client["of the loop"])
        engine.load_checkpoint(folder, tag="three", **options)
    elif order != BEGUN:
        own.load_state_dict(begun)
        own.load_state_dict(client["of the loop"])
    if "object" not in order:
        own.step()
    found = rates(engine, range(3, WINDOWS), None if kept else own)
    engine.destroy()
    return found


@on_two_ranks
def taken_away(folder):
    results = {}
    for name in SCHEDULERS:
        found = results[name] = {}
        for way in ("kept", "stepped", "stepped now and then", "never stepped"):
            engine = engine_with(name)
            own = None if way == "kept" else taken_from(engine)
            stepped = None if way == "never stepped" else own
            found[way] = rates(engine, range(WINDOWS), stepped, every=3 if way == "stepped now and then" else 1)
            engine.destroy()
        found |= resumed(f"{folder}/{name}", name)
    return from_all(results)


@pytest.mark.parametrize("name", SCHEDULERS)
class TestTakenAway:
    """`lr_progress: rollout`, and `engine.lr_scheduler = None` behind initialize()."""

    def test_the_loops_own_step_goes_to_where_the_rollouts_are(self, two_ranks, name):
        for found in two_ranks.of(taken_away):
            assert found[name]["stepped"] == found[name]["kept"]
            assert len(set(found[name]["kept"])) > 2

    def test_it_stands_still_where_nobody_steps_it(self, two_ranks, name):
        for found in two_ranks.of(taken_away):
            of = found[name]
            assert len(set(of["never stepped"])) == 1
            assert of["stepped now and then"] == [of["never stepped"][0]] * 2 + [of["kept"][2]] * 3 + [of["kept"][5]]

    @pytest.mark.parametrize("engine", ["the same", "another", *BY_THE_LOOP])
    def test_a_run_goes_on_from_its_checkpoint(self, two_ranks, name, engine):
        for found in two_ranks.of(taken_away):
            assert found[name][engine] == found[name]["kept"][3:]

    def test_a_schedule_begins_whose_state_nobody_loads(self, two_ranks, name):
        for found in two_ranks.of(taken_away):
            assert found[name][BEGUN] == found[name]["kept"][:3]
