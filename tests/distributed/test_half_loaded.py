"""An engine whose load has ended half way trains no further, and saves nothing, until a whole one has followed."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import at_length_on_two_ranks, on_two_ranks

pytestmark = pytest.mark.ranks
ALONE = {"load_optimizer_states": False, "load_lr_scheduler_states": False}


def _built(stage, boundary, passes):
    caller = {"boundary": "caller"} if boundary == "caller" else {}
    extended = config(stage, passes=passes, optimizer="AdamW", exchange_timeout=60, **caller)
    if caller:
        extended.pop("gradient_accumulation_passes")
    return build(extended)


def _trains(engine):
    for seed in range(2):
        one_pass(engine, seed, rollouts=1)


def _damaged(path):
    """A copy of a checkpoint whose files of the model have no module in them, as no look at their ends can tell."""
    if dist.get_rank() == 0:
        shutil.copytree(path / "own", path / "damaged")
        for file in (path / "damaged").glob("*model_states.pt"):
            whole = bytearray(file.read_bytes())
            at = whole.find(b"dp_world_size")
            whole[at - 8 : at + 8] = b"\xff" * 16
            file.write_bytes(whole)
    dist.barrier()


def _said(path, stage, boundary):
    """What each call ends in behind a load that has raised half way, of all ranks."""
    first = _built(stage, boundary, 4)
    _trains(first)
    first.save_checkpoint(str(path), tag="own")
    _damaged(path)
    engine = _built(stage, boundary, 4)
    said = {}
    for name, call in {
        "missing": lambda: engine.load_checkpoint(str(path), tag="nowhere"),
        "train behind missing": lambda: _trains(engine),
        "damaged": lambda: engine.load_checkpoint(str(path), tag="damaged"),
        "train": lambda: _trains(engine),
        "save": lambda: engine.save_checkpoint(str(path), tag="half"),
        "weights": lambda: engine.save_16bit_model(str(path)),
        "finish": engine.finish,
        "alone": lambda: engine.load_checkpoint(str(path), tag="own", **ALONE),
        "train behind alone": lambda: _trains(engine),
        "whole": lambda: engine.load_checkpoint(str(path), tag="own"),
        "train behind whole": lambda: _trains(engine),
    }.items():
        said[name] = from_all(refusal(call))
        dist.barrier()
    return said


def _is_right(said):
    """Half a checkpoint is neither trained nor saved; a whole one, and a load of nothing, let the engine train."""
    assert all("is not whole" in one and "start a new engine" in one for one in said["damaged"])
    for name in ("train", "save", "weights", "finish", "train behind alone"):
        assert all(one.startswith("CheckpointError") for one in said[name]), said[name]
        assert all("has raised in this engine, and ended half way" in one for one in said[name])
    assert all("no such folder" in one and one.endswith("Nothing was loaded") for one in said["missing"])
    for name in ("train behind missing", "alone", "whole", "train behind whole"):
        assert set(said[name]) == {"nothing was raised"}, (name, said[name])


@on_two_ranks
def half_loaded(folder):
    """By ZeRO stage."""
    return {stage: _said(Path(folder) / f"half-{stage}", stage, "rollouts") for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_trains_and_saves_a_whole_checkpoint_alone(two_ranks, stage):
    _is_right(two_ranks.of(half_loaded)[str(stage)])


@at_length_on_two_ranks
def half_loaded_of_callers(folder):
    """By ZeRO stage, with boundaries that the caller sets."""
    return {stage: _said(Path(folder) / f"callers-{stage}", stage, "caller") for stage in STAGES}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_caller_trains_and_saves_a_whole_checkpoint_alone(two_ranks_at_length, stage):
    _is_right(two_ranks_at_length.of(half_loaded_of_callers)[str(stage)])


@on_two_ranks
def other_target(folder):
    """What an engine with another target is told, and one that then loads the weights alone."""
    first = build(config(1, passes=2, optimizer="AdamW"))
    _trains(first)
    first.save_checkpoint(folder, tag="two")
    engine = build(config(1, passes=6, optimizer="AdamW"))
    calls = [
        lambda: engine.load_checkpoint(folder, tag="two"),
        lambda: engine.load_checkpoint(folder, tag="two", **ALONE),
        lambda: _trains(engine),
    ]
    return from_all([refusal(call) for call in calls])


def test_weights_alone_over_a_refused_target_do_not_train_with_its_moments(two_ranks):
    for whole, alone, trained in two_ranks.of(other_target):
        assert whole.startswith("CheckpointError: the checkpoint was counting towards a target of 2 rollouts")
        assert whole.endswith("Loading ends half way, so start a new engine")
        assert alone == "nothing was raised"
        assert trained.startswith("CheckpointError: ")
        assert "ended half way" in trained
