"""A rank that is killed or falls silent, wherever it is: the other one raises inside the limit."""

import os
import signal
import time
from itertools import product

import pytest

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import forward, perceptron

LIMIT = 3.0  # seconds that ranks wait for each other
SLACK = 6.0  # an engine, five passes and two busy cores
# Before an engine is built nobody is bound by exchange_timeout: that is the process group's own wait.
PLACES = (
    "forward",
    "between",
    "stream",
    "inside the backward",
    "after the backward",
    "optimizer",
    "save",
    "load",
    "finish",
    "advantages",
)
COUNT = 8  # micro-batches


class Ended:
    """Ends this rank, or has it sleep, at one of PLACES, once it is armed."""

    def __init__(self, how, place, odd):
        self.how, self.place, self.odd, self.armed, self.at = how, place, odd, False, time.monotonic()

    def arm(self):
        """The next time that the place is reached is the last."""
        self.armed, self.at = True, time.monotonic()

    def reach(self, place):
        """Say that this rank is there."""
        if self.odd and self.armed and place == self.place:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(5 * LIMIT)


def trains(rank, how, place, stage, folder):
    """Train until rank 1 is ended; returns what rank 0 is told, and after how many seconds."""
    ended = Ended(how, place, odd=rank == 1)
    try:
        _train(ended, stage, folder)
    except ds_parity.DsParityError as error:
        return [f"{type(error).__name__}: {error}", time.monotonic() - ended.at]
    return ["nothing was raised", time.monotonic() - ended.at]


def _train(ended, stage, folder):
    engine = _engine(ended, stage)
    if ended.place == "load":
        engine.save_checkpoint(folder)
    for number, _ in enumerate(engine.passes(_stream(ended))):
        loss = _forward(engine, ended, number)
        ended.reach("between")
        engine.backward(loss)
        ended.reach("after the backward")
        engine.step()
        if number == 5:
            _call(engine, ended, folder)
    ended.reach("finish")
    engine.finish()


def _engine(ended, stage):
    model = perceptron()
    for one in model.parameters():
        one.register_hook(lambda gradient: ended.reach("inside the backward"))
    extended = config(stage, passes=4, exchange_timeout=LIMIT)
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended)
    step = engine.optimizer.step

    def reached(*arguments, **keywords):
        ended.reach("optimizer")
        return step(*arguments, **keywords)

    engine.optimizer.step = reached
    return engine


def _stream(ended):
    for number in range(COUNT):
        if number == 5:
            ended.arm()
        ended.reach("stream")
        yield ds_parity.MicroBatch({}, rollouts=1)
    if ended.place == "finish":
        ended.arm()


def _forward(engine, ended, number):
    ended.reach("forward")
    return forward(engine, number)


def _call(engine, ended, folder):
    calls = {
        "save": lambda: engine.save_checkpoint(folder),
        "load": lambda: engine.load_checkpoint(folder),
        "advantages": lambda: engine.group_advantages(["a"], [1.0]),
    }
    if ended.place in calls:
        ended.arm()
        ended.reach(ended.place)
        calls[ended.place]()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("how", "place"), product(("killed", "silent"), PLACES))
def test_the_other_rank_is_told_inside_the_limit(forks, how, place, stage, tmp_path):
    outcomes = forks.run(trains, 2, 60, how=how, place=place, stage=stage, folder=str(tmp_path))
    assert outcomes[0].how == "returned", outcomes
    message, seconds = outcomes[0].value
    assert message.startswith("RankDesyncError: "), outcomes
    assert seconds < LIMIT + SLACK
    if how == "killed":
        assert outcomes[1].how == "died"
