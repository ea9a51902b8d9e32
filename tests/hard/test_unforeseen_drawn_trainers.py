"""Trainers drawn at random, in every precision: each step is that of torch's own optimizer in fp64 over linear losses.

They mix optimizers of DeepSpeed and torch, however given, groups with values of their own, schedules of both by steps
and by rollouts, options of ZeRO, overflows in one pass of one rank, idle passes, writes to groups, weights and states
between windows, and checkpoints.
"""

import faulthandler
import gc
import os
import shutil
import tempfile
import warnings

import pytest
import torch.distributed as dist

from ds_parity.parity.running.half_precision import experiment
from tests.hard.unforeseen.drawn_trainers import drawn
from tests.hard.unforeseen.trainer_player import TrainerPlayer

SEEDS, OF_ONE_START = "0:60", 20
SECONDS = 60  # for one trainer; most take one


def play(rank, seeds):
    """Play the trainers of seeds; return by seed what was wrong."""
    warnings.filterwarnings("ignore")
    found = {}
    for seed in seeds:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        with experiment():
            said = _played(drawn(seed))
        if said:
            found[seed] = said
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
    return found


def _played(trainer):
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        player = TrainerPlayer(trainer, folder[0])
        wrong = player.play()
    except Exception as error:
        raise RuntimeError(f"{trainer}: {type(error).__name__}: {error}") from error
    player.engine.destroy()
    dist.barrier()  # others may still read there
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return {"trainer": str(trainer), "wrong": wrong, "log": player.log} if wrong else None


# More trainers than in the suite: UNFORESEEN_TRAINERS=1000:1100 plays those of these seeds.
FIRST, LAST = map(int, os.environ.get("UNFORESEEN_TRAINERS", SEEDS).split(":"))


@pytest.mark.parametrize("first", range(FIRST, LAST, OF_ONE_START))
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_step_is_that_of_torch(forks, ranks, first):
    outcomes = forks.run(play, ranks, OF_ONE_START * SECONDS, seeds=list(range(first, min(LAST, first + OF_ONE_START))))
    assert [(one.how, one.value) for one in outcomes] == [("returned", {})] * ranks
