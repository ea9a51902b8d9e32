"""Experts on each rank, or half of them on each: steps are an oracle's; an idle rank of half is refused."""

import pytest

import ds_parity
from tests.hard.unforeseen.cells import STAGES, Found, Watched
from tests.hard.unforeseen.experts import Experts, Whole, apart, grouped
from tests.hard.unforeseen.oracle import sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()


def watched_experts(case, ranks_with_an_expert):
    """An engine with experts beside an oracle with all of them; two passes of two rollouts a rank make a window."""
    model, ranks = Experts(ranks_with_an_expert), play.ranks
    given = {"optimizer": grouped(model)}
    return Watched(case.cell, 4 * ranks, model=model, right=Whole(), optimizer=False, given=given)


def found(watched):
    """Finish both, and compare."""
    watched.engine.finish()
    watched.oracle.finish()
    return Found(apart(watched), [watched.engine.global_steps], [len(watched.oracle.losses)])


@play.right(STAGES[:3], [f"{where}-{sizes}" for where in ("everywhere", "halves") for sizes in ("uniform", "ragged")])
def every_rank_has_samples(case):
    """Two each, which make 2 rollouts in all passes, or 1 to 3."""
    watched = watched_experts(case, 2 if case.variant.startswith("halves") else 1)
    for index in range(6):
        sizes = [1 + (rank + index) % 3 if case.variant.endswith("ragged") else 2 for rank in range(watched.ranks)]
        watched.engine.backward(watched.loss(index), rollouts=sizes[watched.rank])
        watched.engine.step()
        for rank, size in enumerate(sizes):
            x, y = (one.double() for one in sample(rank, index, 2))
            watched.oracle.add(size, lambda model, x=x, y=y: model(x, y))
        watched.oracle.end_pass(sum(sizes))
    return found(watched)


@play.right(STAGES[:3], ["everywhere"])
@play.refused(STAGES[:3], {"halves": ("RankDesyncError: ", "WindowError: an idle pass with experts")})
def a_rank_is_idle(case):
    """In every second pass, which it says itself."""
    watched = watched_experts(case, 2 if case.variant == "halves" else 1)
    for index in range(6):
        idle = index % 2 and watched.rank == 1
        if idle:
            watched.engine.idle(watched.loss(index))
        else:
            watched.engine.backward(watched.loss(index), rollouts=2)
        watched.engine.step()
        watched.noted(index, 2, 0 if index % 2 else 2)
    return found(watched)


@play.right(STAGES[:3])
def a_rank_runs_out_of_data(case):
    """It has three micro-batches, and the other six."""
    watched = watched_experts(case, 1)
    counts = (6, 3)
    stream = [ds_parity.MicroBatch({"index": index}, rollouts=2) for index in range(counts[watched.rank])]
    for batch in watched.engine.passes(stream):
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
    for index in range(6):
        watched.noted(index, *(2 if index < count else 0 for count in counts))
    return found(watched)


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
