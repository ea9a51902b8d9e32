"""Programs with linear losses, drawn at random in every precision: each weight is where an account in fp64 has it.

They mix all of ZeRO's options, terms of several units, loops, passes() and windows of the caller, engines of install(),
schedulers, checkpoints that go on with the other boundary, parameters that are frozen, hooks, gradients that a loop
changes, errors midway, and two engines in turn.
"""

import random
import threading

import pytest
import torch.distributed as dist

from ds_parity.parity.running.half_precision import experiment
from tests.hard.unforeseen.linear_checks import differing_weights
from tests.hard.unforeseen.linear_players import LinearPlayer
from tests.hard.unforeseen.linear_programs import drawn
from tests.hard.unforeseen.seeds import batches, played, shared_folder

SEEDS, OF_ONE_START = "18:30", 12  # of these, one at least finds what is left out with CPU offload
SECONDS = 100  # for one program
SECOND = 1_000_000  # the seed of the program that takes turns with another, behind that one's


def play(rank, seeds):
    """Play the programs of seeds; return by seed what was wrong, and the log."""
    return played(seeds, _played, SECONDS)


def _played(seed):
    with experiment(), shared_folder() as folder:
        return _taken_turns(seed, folder)


def _taken_turns(seed, folder):
    players = [LinearPlayer(program, f"{folder}/{number}") for number, program in enumerate(_programs(seed))]
    for player in players:
        player.takes_turns = len(players) > 1
    turns, chance = {player: _turns(player) for player in players}, random.Random(seed)
    try:
        while turns:
            player = chance.choice(list(turns))
            if next(turns[player], True):
                del turns[player]
    except Exception as error:
        logs = [(str(one.program), one.log) for one in players]
        raise RuntimeError(f"{seed}: {logs}: {type(error).__name__}: {error}") from error
    said = []
    for player in players:
        player.wrong += differing_weights(player.engine)
        if player.wrong:
            said.append({"program": str(player.program), "wrong": player.wrong, "log": player.log})
        player.engine.destroy()
    return said


def _programs(seed):
    """The program of a seed, and sometimes one that takes turns with it."""
    first, ranks = drawn(seed, dist.get_world_size()), dist.get_world_size()
    others = [drawn(seed + SECOND, ranks)] if seed % 4 == 3 else []
    # DeepSpeed has one torch_autocast, and one hpZ, for all engines of a process.
    return [first, *(one for one in others if not any(map(_marks_process, (first, one))))]


def _marks_process(program):
    return program.precision.startswith("autocast") or "zero_hpz_partition_size" in program.zero


def _turns(player):
    """Yield between its turns, and True behind the last."""
    steps = player.acts(10)
    while not (ended := _in_thread(steps) if player.program.threaded else next(steps, steps) is steps):
        yield False
    yield ended


def _in_thread(steps):
    """Go on in a new thread, as an actor of Ray does with each call; whether that was the end."""
    box = []

    def run():
        try:
            box.append(next(steps, steps))
        except Exception as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0] is steps


# More programs than in the suite: UNFORESEEN_LINEAR_PROGRAMS=1000:1100 plays those of these seeds.
@pytest.mark.parametrize("seeds", batches("UNFORESEEN_LINEAR_PROGRAMS", SEEDS, OF_ONE_START), ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_weight_is_where_the_account_has_it(forks, ranks, seeds):
    outcomes = forks.run(play, ranks, OF_ONE_START * SECONDS, seeds=list(seeds))
    assert [(one.how, one.value) for one in outcomes] == [("returned", {})] * ranks
