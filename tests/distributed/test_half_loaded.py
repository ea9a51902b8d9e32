"""An engine whose load has ended half way trains no further, and saves nothing, until a whole one has followed."""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
ALONE = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
BOUNDARIES = ("rollouts", "caller")


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


@on_two_ranks
def half_loaded(folder):
    """By ZeRO stage and boundary: what each call ends in behind a load that has raised half way."""
    results = {}
    for stage, boundary in product(STAGES, BOUNDARIES):
        path = Path(folder) / f"half-{stage}-{boundary}"
        first = _built(stage, boundary, 4)
        _trains(first)
        first.save_checkpoint(str(path), tag="own")
        _damaged(path)
        engine = _built(stage, boundary, 4)
        said = {}
        for name, call in {
            "missing": lambda: engine.load_checkpoint(str(path), tag="nowhere"),  # noqa: B023
            "train behind missing": lambda: _trains(engine),  # noqa: B023
            "damaged": lambda: engine.load_checkpoint(str(path), tag="damaged"),  # noqa: B023
            "train": lambda: _trains(engine),  # noqa: B023
            "save": lambda: engine.save_checkpoint(str(path), tag="half"),  # noqa: B023
            "weights": lambda: engine.save_16bit_model(str(path)),  # noqa: B023
            "finish": engine.finish,
            "alone": lambda: engine.load_checkpoint(str(path), tag="own", **ALONE),  # noqa: B023
            "train behind alone": lambda: _trains(engine),  # noqa: B023
            "whole": lambda: engine.load_checkpoint(str(path), tag="own"),  # noqa: B023
            "train behind whole": lambda: _trains(engine),  # noqa: B023
        }.items():
            said[name] = from_all(refusal(call))
            dist.barrier()
        results[f"{stage} {boundary}"] = said
    return results


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("stage", STAGES)
def test_half_a_checkpoint_is_neither_trained_nor_saved(two_ranks, stage, boundary):
    said = two_ranks.of(half_loaded)[f"{stage} {boundary}"]
    assert all("is not whole" in one and "start a new engine" in one for one in said["damaged"])
    for name in ("train", "save", "weights", "finish", "train behind alone"):
        assert all(one.startswith("CheckpointError") for one in said[name]), said[name]
        assert all("has raised in this engine, and ended half way" in one for one in said[name])


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_whole_checkpoint_and_a_load_of_nothing_let_it_train(two_ranks, stage, boundary):
    said = two_ranks.of(half_loaded)[f"{stage} {boundary}"]
    assert all("no such folder" in one and one.endswith("Nothing was loaded") for one in said["missing"])
    for name in ("train behind missing", "alone", "whole", "train behind whole"):
        assert set(said[name]) == {"nothing was raised"}, (name, said[name])


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
