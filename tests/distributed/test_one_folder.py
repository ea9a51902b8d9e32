"""Engines of one process that are saved under one tag of one folder: the second one does not replace the first."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.cells import config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
STAGES = (0, 1, 2, 3)
REFUSED = "another engine of this process has saved its checkpoint there"


def _trained(stage, windows):
    engine = build(config(stage, passes=4, optimizer="AdamW", exchange_timeout=60))
    for number in range(2 * windows):
        one_pass(engine, number)
    return engine


def _written(folder):
    """When each file was written; every rank looks once all have saved, and before one goes on."""
    dist.barrier()
    found = sorted((one.name, one.stat().st_mtime_ns) for one in Path(folder).rglob("*") if one.is_file())
    dist.barrier()
    return found


def _saves_beside(stage, folder):
    """What a save of the critic ends in, by what was done with the actor before; of all ranks."""
    actor, critic, third = (_trained(stage, windows) for windows in (1, 2, 1))
    said = {}
    actor.save_checkpoint(folder, tag="1")
    before = _written(folder)
    said["lives"] = from_all(refusal(lambda: critic.save_checkpoint(folder, tag="1")))
    said["nothing written"] = _written(folder) == before
    link = f"{folder}-link"
    if dist.get_rank() == 0:
        Path(link).symlink_to(folder)
    dist.barrier()
    said["by a link"] = from_all(refusal(lambda: critic.save_checkpoint(link, tag="1")))
    said["another tag"] = from_all(refusal(lambda: critic.save_checkpoint(folder, tag="2")))
    said["a folder of its own"] = from_all(refusal(lambda: critic.save_checkpoint(f"{folder}-critic", tag="1")))
    said["the actor again"] = from_all(refusal(lambda: actor.save_checkpoint(folder, tag="1")))
    # Weights that go on under the same tag, as "best" of a run that was resumed in this process.
    critic.load_checkpoint(folder, tag="1")
    said["the critic has loaded it"] = from_all(refusal(lambda: critic.save_checkpoint(folder, tag="1")))
    said["the actor behind it"] = from_all(refusal(lambda: actor.save_checkpoint(folder, tag="1")))
    # One that has only loaded it replaces nothing, and nobody replaces what it has not saved.
    critic.load_checkpoint(f"{folder}-critic", tag="1")
    actor.load_checkpoint(folder, tag="1")
    said["the actor has loaded it, too"] = from_all(refusal(lambda: actor.save_checkpoint(folder, tag="1")))
    later = _trained(stage, 1)
    said["a run behind them"] = from_all(refusal(lambda: later.save_checkpoint(folder, tag="2")))
    # The actor goes on: it is no run of before.
    actor.save_checkpoint(folder, tag="3")
    said["a run beside it"] = from_all(refusal(lambda: later.save_checkpoint(folder, tag="1")))
    said["a third one"] = from_all(refusal(lambda: third.save_checkpoint(folder, tag="1")))
    for one in (actor, critic):
        one.destroy()
    said["both are destroyed"] = from_all(refusal(lambda: third.save_checkpoint(folder, tag="1")))
    return said


@on_two_ranks
def saves(folder):
    """What a second engine's save ends in, by ZeRO stage."""
    return {stage: _saves_beside(stage, f"{folder}/{stage}") for stage in STAGES}


@on_two_ranks
def gone(folder):
    """The same where the first engine's files are removed, or its name is that of no folder."""
    first, second = (_trained(1, 1) for _ in range(2))
    first.save_checkpoint(folder, tag="1")
    dist.barrier()
    if dist.get_rank() == 0:
        for one in Path(folder).rglob("*.pt"):
            one.unlink()
        (Path(folder) / "1").rmdir()
    dist.barrier()
    return from_all(refusal(lambda: second.save_checkpoint(folder, tag="1")))


def test_a_second_engine_does_not_replace_the_checkpoint_of_the_first(two_ranks, stage):
    said = two_ranks.of(saves)[stage]
    for name in ("lives", "by a link", "the actor behind it", "a run beside it", "a third one"):
        assert all(one.startswith("CheckpointError: save_checkpoint(") and REFUSED in one for one in said[name]), name
        assert len(set(said[name])) == 1, said[name]
    assert said["nothing written"]


def test_who_goes_on_in_a_checkpoint_may_save_it_again(two_ranks, stage):
    said = two_ranks.of(saves)[stage]
    taken = ("another tag", "a folder of its own", "the actor again", "the critic has loaded it")
    for name in (*taken, "the actor has loaded it, too", "a run behind them", "both are destroyed"):
        assert set(said[name]) == {"nothing was raised"}, (name, said[name])


@on_two_ranks
def looped(folder):
    """A folder that is a loop of links, on the first rank alone."""
    engine = _trained(1, 1)
    loop = Path(folder) / f"loop-{dist.get_rank()}"
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        loop.symlink_to(loop)
    dist.barrier()
    return from_all(refusal(lambda: engine.save_checkpoint(str(loop), tag="1")))


@on_two_ranks
def only_loaded(folder):
    """An engine that evaluates has loaded what an actor saves, of a run before."""
    first = _trained(1, 1)
    first.save_checkpoint(folder, tag="best")
    first.destroy()
    actor, evaluating = (_trained(1, 1) for _ in range(2))
    evaluating.load_checkpoint(folder, tag="best", load_module_only=True)
    return from_all(refusal(lambda: actor.save_checkpoint(folder, tag="best")))


def test_a_loop_of_links_is_told_to_every_rank(two_ranks):
    for said in two_ranks.of(looped):
        assert said.startswith("CheckpointError: save_checkpoint("), said


def test_what_was_only_loaded_may_be_replaced(two_ranks):
    assert set(two_ranks.of(only_loaded)) == {"nothing was raised"}


def test_a_checkpoint_that_was_removed_belongs_to_nobody(two_ranks):
    assert set(two_ranks.of(gone)) == {"nothing was raised"}
