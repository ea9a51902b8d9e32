"""Four ranks of very uneven streams, and experts on pairs of ranks, beside the oracle."""

import json
from pathlib import Path

import pytest

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, Watched
from tests.hard.unforeseen.experts import Experts, Whole, apart, grouped
from tests.hard.unforeseen.oracle import sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios(ranks=4)
COUNTS = (11, 2, 0, 6)


def _tokens(rank, index):
    return 1 + (3 * index + rank) % 4


def _rollouts(rank, index):
    return max(1, _tokens(rank, index) // 2)


@play.right(CELLS, ["0", "3", "7"])
def one_rank_has_nothing_and_others_little(case):
    """Losses weigh tokens, windows count rollouts, and idle passes are NaN; the trace has what happened."""
    trace = Path(f"{case.folder}-trace.jsonl")
    watched = Watched(case.cell, 10, section={"loss_weight": "token", "trace": str(trace)})
    rank, x, y = watched.rank, *sample(3, 0, 1)
    stream = [
        ds_parity.MicroBatch({"index": index}, rollouts=_rollouts(rank, index), tokens=_tokens(rank, index))
        for index in range(COUNTS[rank])
    ]
    idle = ds_parity.MicroBatch({"index": None}, rollouts=0, tokens=0)
    for batch in watched.engine.passes(stream, lookahead=int(case.variant), idle=idle):
        index, device = batch.inputs["index"], watched.engine.device
        if index is None:
            loss = watched.engine(float("nan") * x.to(device), y.to(device))
        else:
            loss = watched.loss(index, _tokens(rank, index))
        watched.engine.record("own", 2.0 if batch.rollouts else 7.0)
        watched.engine.backward(loss)
        watched.engine.step()
    for index in range(max(COUNTS)):
        live = [other for other, count in enumerate(COUNTS) if index < count]
        for other in live:
            x, y = (one.double() for one in sample(other, index, _tokens(other, index)))
            watched.oracle.add(len(x), lambda model, x=x, y=y: model(x, y))
        watched.oracle.end_pass(sum(_rollouts(other, index) for other in live))
    # What idle passes record counts nothing.
    found = watched.found([watched.engine.last_step.metrics["own"]], [2.0])
    if rank == 0:
        lines = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
        found.got += [[line["rollouts"] for line in lines], *(line["loss"] for line in lines)]
        found.right += [watched.oracle.steps, *watched.oracle.losses]
    return found


@play.right([Cell(1), Cell(2)], ["everywhere"])
def experts_lie_on_every_rank(case):
    """Each rank brings 1 to 3 rollouts."""
    model = Experts(1)
    given = {"optimizer": grouped(model)}
    watched = Watched(case.cell, 16, model=model, right=Whole(), optimizer=False, given=given)
    for index in range(6):
        sizes = [1 + (rank + index) % 3 for rank in range(watched.ranks)]
        watched.engine.backward(watched.loss(index, sizes[watched.rank]), rollouts=sizes[watched.rank])
        watched.engine.step()
        watched.noted(index, *sizes)
    watched.engine.finish()
    watched.oracle.finish()
    return Found(apart(watched), [watched.engine.global_steps], [len(watched.oracle.losses)])


OTHERS = "RankDesyncError: "


@play.refused(STAGES[1:3], {"": (OTHERS, "WindowError: an idle pass with experts", OTHERS, OTHERS)})
def a_rank_of_a_pair_is_idle(case):
    """Rank 1, in the second pass."""
    model = Experts(2)
    given = {"optimizer": grouped(model)}
    watched = Watched(case.cell, 16, model=model, right=Whole(), optimizer=False, given=given)
    for index in range(2):
        loss = watched.loss(index)
        if index and watched.rank == 1:
            watched.engine.idle(loss)
        else:
            watched.engine.backward(loss, rollouts=2)
        watched.engine.step()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
