"""Windows that callers end, and ranks that part in them: every rank is told, no process hangs or is ended by gloo."""

import time

import pytest

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import forward, perceptron, refusal

LIMIT = 3.0  # seconds that an engine waits for other ranks
IN_TIME = 25.0  # both ranks' waits, one after the other, with room for two busy cores


def build(stage):
    extended = {**config(stage, passes=8, exchange_timeout=LIMIT)}
    extended["ds_parity"] = {**extended["ds_parity"], "boundary": "caller"}
    extended["ds_parity"].pop("overshoot", None)
    model = perceptron()
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended)[0]


def run(engine, backwards, last=None, ends=True):
    for number in range(backwards):
        if last is not None:
            engine.set_gradient_accumulation_boundary(last and number == backwards - 1)
        engine.backward(forward(engine, number), rollouts=1, tokens=3)
    if ends:
        engine.step()


def wrong_count(engine):
    run(engine, 1, ends=False)
    engine.backward(forward(engine, 1), rollouts=-1, tokens=3)


CALLS = {
    "other numbers of backwards": (lambda e: run(e, 3), lambda e: run(e, 2)),
    "one has none": (lambda e: run(e, 2), lambda e: e.step()),
    "finish in place of a step": (lambda e: run(e, 2), lambda e: (run(e, 2, ends=False), e.finish())),
    "a count that is refused": (lambda e: run(e, 2), wrong_count),
    "one announces the last": (lambda e: run(e, 2, last=True), lambda e: run(e, 2)),
    "a checkpoint in place of a step": (lambda e: run(e, 1), lambda e: (run(e, 1, ends=False), e.save_checkpoint("x"))),
    "expects alone": (lambda e: e.expect(rollouts=1, tokens=3), lambda e: run(e, 1)),
}


def parted(rank, stage, case):
    """What each rank is told where the two do different things in their second window, and after how many seconds."""
    engine = build(stage)
    run(engine, 2)
    begun = time.monotonic()
    said = refusal(lambda: CALLS[case][rank](engine))
    return [said, time.monotonic() - begun]


# What DeepSpeed does in a backward is the same on both ranks there.
TAKEN = {("other numbers of backwards", 0), ("other numbers of backwards", 1), ("one has none", 0), ("one has none", 1)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CALLS)
def test_ranks_that_part_in_a_callers_window_are_told_so(forks, stage, case):
    outcomes = forks.run(parted, 2, 90, stage=stage, case=case)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    said = [one.value[0] for one in outcomes]
    assert all(one.value[1] < IN_TIME for one in outcomes), outcomes
    if (case, stage) in TAKEN or (case == "one announces the last" and stage > 1):
        assert said == ["nothing was raised"] * 2
    else:
        # The rank whose own call was wrong hears of that; the other that ranks have parted.
        kinds = {one.partition(":")[0] for one in said}
        assert "RankDesyncError" in kinds, said
        assert kinds <= {"RankDesyncError", "WindowError", "CheckpointError"}, said


CAUGHT = ("finish in place of a step", "a count that is refused", "a checkpoint in place of a step")


def caught(rank, stage, case):
    """What each rank is told in the next window, where its loop catches every error and goes on."""
    engine = build(stage)
    run(engine, 2)
    said = [refusal(lambda: CALLS[case][rank](engine))]
    return said + [refusal(lambda: run(engine, 2)) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CAUGHT)
def test_no_rank_goes_on_behind_a_window_that_has_parted(forks, stage, case):
    """One rank's next window would be another one's last: each would step on micro-batches of two windows."""
    outcomes = forks.run(caught, 2, 90, stage=stage, case=case)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    for one in outcomes:
        assert "nothing was raised" not in one.value[1:], outcomes


def other_rates(rank, stage):
    """What each rank is told where one has another rate; and, once that is mended, where its step comes again."""
    engine = build(stage)
    run(engine, 2, ends=False)
    rate = engine.optimizer.param_groups[0]["lr"]
    engine.optimizer.param_groups[0]["lr"] = rate * (1 + rank)
    said = [refusal(engine.step)]
    engine.optimizer.param_groups[0]["lr"] = rate
    said.append(refusal(engine.step))
    return [*said, engine.global_steps]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_may_come_again_once_its_rates_are_those_of_all_ranks(forks, stage):
    outcomes = forks.run(other_rates, 2, 90, stage=stage)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    for one in outcomes:
        first, *then = one.value
        assert first.startswith("RankDesyncError: ranks differ in the learning rate of parameter group 0"), outcomes
        assert then == ["nothing was raised", 1], outcomes


def leaves_out(rank, stage):
    """What each rank is told, and when, where one leaves a micro-batch of passes() out."""
    made = config(stage, passes=8, exchange_timeout=20.0)
    model = perceptron()
    engine = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=made)[0]

    def loop():
        for number, _ in enumerate(
            engine.passes([ds_parity.MicroBatch({"number": at}, 1) for at in range(8)], lookahead=1)
        ):
            if rank and number == 1:
                continue
            engine.backward(forward(engine, number))
            engine.step()

    begun = time.monotonic()
    return [refusal(loop), time.monotonic() - begun]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_that_leaves_a_micro_batch_out_is_told_soon(forks, stage):
    first, second = forks.run(leaves_out, 2, 90, stage=stage)
    assert [first.how, second.how] == ["returned"] * 2, [first, second]
    assert second.value[0].startswith("WindowError: passes() was asked for the next micro-batch before"), second
    assert second.value[1] < 15, second
    assert first.value[0].startswith("RankDesyncError: "), first
    if stage == 0:  # on other stages it is inside DeepSpeed then
        assert "rank 1 has raised WindowError: passes() was asked for the next" in first.value[0], first
