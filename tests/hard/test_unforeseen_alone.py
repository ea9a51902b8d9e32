"""One rank does something alone that all ranks must do together, and both live on: every rank is told in time."""

import time

import pytest

import ds_parity
from ds_parity import DsParityError
from tests.distributed.cells import config
from tests.distributed.engines import forward, perceptron

LIMIT, LIVES_ON = 3.0, 8.0  # seconds: of a wait for other ranks, and behind an error


def build(stage, caller=False):
    extended = {**config(stage, passes=4, exchange_timeout=LIMIT)}
    if caller:
        extended["ds_parity"] = {**extended["ds_parity"], "boundary": "caller"}
        extended["ds_parity"].pop("overshoot", None)
    model = perceptron()
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended)[0]


def run(engine, caller, passes=4):
    for number in range(passes):
        engine.backward(forward(engine, number), rollouts=1, tokens=3)
        if not caller or number % 2:
            engine.step()


CALLS = {
    "save": lambda engine, folder: engine.save_checkpoint(folder, "alone"),
    "load": lambda engine, folder: engine.load_checkpoint(folder, "first"),
    "finish": lambda engine, _: engine.finish(),
    "expect": lambda engine, _: engine.expect(rollouts=2, tokens=6),
    "advantages": lambda engine, _: engine.group_advantages([1, 2], [0.0, 1.0]),
    "passes": lambda engine, _: list(engine.passes([])),
    "look-ahead": lambda engine, _: list(engine.passes([], lookahead=3)),
    "initialize": lambda *_: build(0),
}


def alone(rank, stage, what, caller, folder):
    """What each rank is told where the first does something alone, and after how many seconds."""
    engine = build(stage, caller)
    run(engine, caller)
    engine.save_checkpoint(folder, "first")
    begun, said = time.monotonic(), "nothing was raised"
    try:
        if rank == 0:
            CALLS[what](engine, folder)
        run(engine, caller)
    except DsParityError as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    time.sleep(max(0.0, LIVES_ON - seconds))  # nobody hears of its end
    return [said, seconds]


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("mode", ["rollouts", "caller"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_does_something_alone_and_the_others_are_told(forks, tmp_path, stage, mode, what):
    outcomes = forks.run(alone, 2, 90, stage=stage, what=what, caller=mode == "caller", folder=str(tmp_path))
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    for said, seconds in (one.value for one in outcomes):
        assert said.startswith(("RankDesyncError: ", "WindowError: ")), outcomes
        # On ZeRO 3 the other may wait inside DeepSpeed; the first, whose wait has no limit of ours, hears when it ends.
        waits = 3 * LIVES_ON if stage == 3 else LIVES_ON
        assert seconds < waits, "it was told, and did not wait for the other's end"
