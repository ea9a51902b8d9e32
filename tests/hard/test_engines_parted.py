"""Two engines, and ranks that part between them: every rank is told at once, and no process is ended by gloo."""

import time

import pytest
import torch

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import Batch, build, one_pass, perceptron, refusal

LIMIT = 30.0  # seconds that an engine waits for other ranks
AT_ONCE = 10.0  # less than that, with room for two busy cores


def parted(rank, stage, case):
    """What each rank is told where the two do different things, and after how many seconds."""
    first = build(config(stage, passes=8, exchange_timeout=LIMIT, lookahead=3))
    # Its first message does not fit into what travels at once.
    second = build(config(stage, passes=8, exchange_timeout=2 * LIMIT, lookahead=500))
    calls = {
        "two loops": (lambda: _loop(first), lambda: _loop(second)),
        "two streams": (lambda: _stream(first), lambda: _stream(second)),
        "finish": (lambda: _stream(second), first.finish),
        "another look-ahead": (lambda: list(first.passes([Batch()], lookahead=7)), lambda: _stream(second)),
        "another look-ahead of one engine": (
            lambda: list(first.passes([Batch()], lookahead=7)),
            lambda: _stream(first),
        ),
        "advantages": (lambda: first.group_advantages([1, 1], [0.0, 1.0]), lambda: _stream(second)),
        "a third engine": (lambda: build(config(stage, passes=8)), lambda: _stream(second)),
        "the end of a step": (first._self_driver.meter.settle, lambda: _stream(second)),
        "the end of a step and advantages": (
            second._self_driver.meter.settle,
            lambda: first.group_advantages([1, 1], [0.0, 1.0]),
        ),
    }
    return _timed(calls[case][rank])


def swapped(rank, stage, alike):
    """Ranks build two engines in another order: of models that differ, or not."""
    models = [perceptron(), perceptron() if alike else _narrow()]
    extended = config(stage, passes=8, exchange_timeout=LIMIT)
    built = []
    message, seconds = _timed(lambda: built.extend(map(_build(extended), reversed(models) if rank else models)))
    if message == "nothing was raised":
        message, seconds = _timed(lambda: _loop(built[rank]))
    return [message, seconds]


def _build(extended):
    return lambda model: ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended)[0]


def _narrow():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))


def _timed(call):
    begun = time.monotonic()
    return [refusal(call), time.monotonic() - begun]


def _loop(engine):
    one_pass(engine, 1, rollouts=1, tokens=3)


def _stream(engine):
    for _ in engine.passes([Batch() for _ in range(8)], finish=False):
        one_pass(engine, 1)


CASES = {
    "two loops": "rank 0 runs a pass in window 0, pass 0, engine 1, .*rank 1 runs a pass in window 0, pass 0, engine 2",
    "two streams": "engine 1, .*engine 2, ",
    "finish": "rank 1 finishes in window 0, pass 0, engine 1",
    "another look-ahead": "rank 0 begins passes() with another look-ahead in window 0, pass 0, engine 1",
    "another look-ahead of one engine": "rank 0 begins passes() with another look-ahead in window 0, pass 0, engine 1",
    "advantages": "rank 0 gathers rewards in window 0, pass 0, engine 1",
    "a third engine": "rank 0 initializes an engine; rank 1 runs a pass in window 0, pass 0, engine 2",
    "the end of a step": "rank 0 sums the loss and metrics of a step in window 0, pass 0, engine 1",
    "the end of a step and advantages": "rank 1 gathers rewards in window 0, pass 0, engine 1",
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_do_different_things_with_two_engines_are_told_so_at_once(forks, stage, case):
    outcomes = forks.run(parted, 2, 90, stage=stage, case=case)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    for message, seconds in (one.value for one in outcomes):
        assert message.startswith("RankDesyncError: ranks are not in the same place: ")
        assert all(part in message for part in CASES[case].split(".*")), message
        assert seconds < AT_ONCE


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_build_two_engines_in_another_order_are_told_by_the_parameters_that_differ(forks, stage):
    outcomes = forks.run(swapped, 2, 90, stage=stage, alike=False)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    for message, seconds in (one.value for one in outcomes):
        assert message.startswith("RankDesyncError: ranks differ in parameter 0.bias (rank 0 has torch.float32 (8,); ")
        assert "initialize their engines in the same order" in message
        assert seconds < AT_ONCE


@pytest.mark.parametrize("stage", [0, 3])
def test_engines_of_equal_models_in_another_order_are_found_out_by_their_first_pass(forks, stage):
    outcomes = forks.run(swapped, 2, 90, stage=stage, alike=True)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    for message, seconds in (one.value for one in outcomes):
        assert "rank 0 runs a pass in window 0, pass 0, engine 1, " in message
        assert "rank 1 runs a pass in window 0, pass 0, engine 2, " in message
        assert seconds < AT_ONCE
