"""Programs over all public calls, drawn at random in both driving modes, on 2 and 4 ranks: each window is the oracle's.

They mix passes() of uneven streams that are left early, loops with idle(), windows of the caller in every style,
promises, checkpoints that are loaded here, anew or later, finish(), rates set by hand, evaluations, and calls that are
refused; over all stages, offload, buckets, models, optimizers, schedules, weights, reductions and types of counts.
"""

import pytest
import torch
import torch.distributed as dist

from tests.hard.unforeseen.players import Player
from tests.hard.unforeseen.programs import drawn
from tests.hard.unforeseen.seeds import batches, played, shared_folder

SEEDS, OF_ONE_START = "0:36", 12  # engines of ZeRO 3 stay in memory for good, so a start plays some programs only
SECONDS = 100  # for one program


def play(rank, seeds):
    """Play the programs of seeds; return by seed what was wrong, and the log."""
    return played(seeds, _played, SECONDS)


def _played(seed):
    with shared_folder() as folder:
        player = Player(drawn(seed, dist.get_world_size()), folder)
        try:
            player.play()
        except Exception as error:
            raise RuntimeError(f"{player.program}: {player.log}: {type(error).__name__}: {error}") from error
        player.wrong += _between_ranks(player.engine)
        player.engine.destroy()
    if not player.wrong:
        return None
    return {"program": str(player.program), "wrong": player.wrong, "log": player.log}


def _between_ranks(engine):
    """Say so where the weights of ranks differ by a bit."""
    if int(engine.zero_optimization_stage()) == 3:
        return []  # each rank has gathered those of all
    least = torch.cat([one.detach().flatten() for one in engine.module.parameters()])
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [] if torch.equal(least, most) else ["the weights of ranks differ"]


# More programs than in the suite: UNFORESEEN_PROGRAMS=1000:1400 plays those of these seeds.
@pytest.mark.parametrize("seeds", batches("UNFORESEEN_PROGRAMS", SEEDS, OF_ONE_START), ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_window_of_a_program_is_the_oracles(forks, ranks, seeds):
    outcomes = forks.run(play, ranks, OF_ONE_START * SECONDS, seeds=list(seeds))
    assert [(one.how, one.value) for one in outcomes] == [("returned", {})] * ranks
