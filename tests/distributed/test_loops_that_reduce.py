"""Loops that say when gradients are reduced, by `no_sync()` or a reduction of their own, are refused by our errors."""

from itertools import product

import deepspeed
import pytest

from tests.distributed.cells import config
from tests.distributed.engines import build, forward
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


def _said(function, *arguments):
    """Whatever the call ends in, also what is none of our errors."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _inside(block, function, *arguments):
    with block():
        function(*arguments)


def _nested(engine):
    with engine.no_sync():
        pass


def _apart(*engines):
    weights = []
    for engine in engines:
        parameters = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            weights.append([one.detach().clone() for one in parameters])
    return max(float((one - other).abs().max()) for one, other in zip(*weights, strict=True))


@on_two_ranks
def blocks_of_no_sync(folder):
    """What no_sync() is answered with where it can't be, and how far the steps are off behind it."""
    results = {}
    for stage, boundary in product((0, 1, 2, 3), ("rollouts", "caller")):
        section = {"boundary": "caller"} if boundary == "caller" else {"passes": 8}
        engine, untouched = (build(config(stage, **section)) for _ in range(2))
        said = results[f"{boundary}-{stage}"] = {}
        for index in range(4):
            for one in (engine, untouched):
                one.backward(forward(one, index), rollouts=1)
                if one is engine:
                    said[f"step {index}"] = _said(_inside, engine.no_sync, engine.step)
                if boundary == "rollouts" or index % 2:
                    one.step()
        if boundary == "caller" and stage:
            with engine.coalesce_grad_reduction():
                engine.backward(forward(engine, 9), rollouts=1)
                said["in a block"] = _said(_nested, engine)
        elif stage < 2:
            engine.backward(forward(engine, 9), rollouts=1)
            said["nested"] = _said(_inside, engine.no_sync, _nested, engine)
            if boundary == "rollouts":
                engine.step()
            said["finish"] = _said(_inside, engine.no_sync, engine.finish)
        said["apart"] = _apart(engine, untouched)
    return results


@pytest.mark.parametrize("boundary", ["rollouts", "caller"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_is_refused_by_name_where_deepspeed_has_an_assertion(two_ranks, stage, boundary):
    said = dict(two_ranks.of(blocks_of_no_sync)[f"{boundary}-{stage}"])
    assert said.pop("apart") == 0.0, "nothing of it reaches a step"
    for case, error in said.items():
        assert error.startswith("WindowError: "), (case, error)
        assert "no_sync()" in error, (case, error)


@on_two_ranks
def reductions_by_the_loop(folder):
    """What a reduction by the loop is answered with where gradients are reduced in the hooks of a backward."""
    results = {}
    for name, stage, zero in (("2", 2, {}), ("1-overlap", 1, {"overlap_comm": True})):
        extended = config(stage, passes=4)
        extended["zero_optimization"] = {**extended["zero_optimization"], **zero}
        engine, untouched = build(extended), build(extended)
        said = []
        for index in range(4):
            for one in (engine, untouched):
                one.backward(forward(one, index), rollouts=1)
                if one is engine and (stage == 2 or index % 2):
                    said.append(_said(engine.allreduce_gradients))
                one.step()
            if stage == 2:
                said.append(_said(engine.allreduce_gradients))
        results[name] = [said, _apart(engine, untouched)]
    return results


@pytest.mark.parametrize("case", ["2", "1-overlap"])
def test_a_reduction_that_hooks_have_done_is_refused(two_ranks, case):
    said, apart = two_ranks.of(reductions_by_the_loop)[case]
    assert said
    assert all(error.startswith("WindowError: engine.allreduce_gradients() on ZeRO stage ") for error in said), said
    assert apart == 0.0
