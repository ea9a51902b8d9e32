"""Trainers drawn at random, in every precision: each step is that of torch's own optimizer in fp64 over linear losses.

They mix optimizers of DeepSpeed and torch, however given, groups with values of their own, schedules of both by steps
and by rollouts, options of ZeRO, overflows in one pass of one rank, idle passes, writes to groups, weights and states
between windows, and checkpoints.
"""

import pytest
from deepspeed.accelerator import get_accelerator

from ds_parity.parity.running.half_precision import experiment
from tests.hard.unforeseen.drawn_trainers import drawn
from tests.hard.unforeseen.seeds import batches, played, shared_folder
from tests.hard.unforeseen.trainer_player import TrainerPlayer

SEEDS, OF_ONE_START = "0:60", 20
SECONDS = 60  # for one trainer; most take one
OPERATORS = ("CPUAdamBuilder", "CPUAdagradBuilder")


def play(rank, seeds):
    """Play the trainers of seeds; return by seed what was wrong."""
    for name in OPERATORS:  # their compilation takes longer than a trainer may
        get_accelerator().create_op_builder(name).load()
    return played(seeds, _played, SECONDS)


def _played(seed):
    trainer = drawn(seed)
    with experiment(), shared_folder() as folder:
        try:
            player = TrainerPlayer(trainer, folder)
            wrong = player.play()
        except Exception as error:
            raise RuntimeError(f"{trainer}: {type(error).__name__}: {error}") from error
        player.engine.destroy()
    return {"trainer": str(trainer), "wrong": wrong, "log": player.log} if wrong else None


# More trainers than in the suite: UNFORESEEN_TRAINERS=1000:1100 plays those of these seeds.
@pytest.mark.parametrize("seeds", batches("UNFORESEEN_TRAINERS", SEEDS, OF_ONE_START), ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_step_is_that_of_torch(forks, ranks, seeds):
    outcomes = forks.run(play, ranks, OF_ONE_START * SECONDS, seeds=list(seeds))
    assert [(one.how, one.value) for one in outcomes] == [("returned", {})] * ranks
