"""References hold a training function to the order of calls that the engine under test holds it to."""

from types import SimpleNamespace

import pytest

from ds_parity.errors import WindowError
from ds_parity.parity.subjects.references.hand_driven import TrainableEngine
from tests.parity.test_whole_windows import steps


def driven():
    """The engine of `deepspeed-loop` over a loop of three passes that notes what it is asked for."""
    ran = []
    loop = SimpleNamespace(
        engine=SimpleNamespace(),
        passes=3,
        runs=lambda index: index,
        backward=lambda index, loss: ran.append(("backward", index)),
        step=lambda index: ran.append(("step", index)),
    )
    return TrainableEngine(loop), ran


def test_a_step_ends_the_pass_of_the_last_backward_also_where_the_next_micro_batch_was_taken():
    engine, ran = driven()
    batches = engine.passes()
    next(batches)
    engine.backward(0.0)
    next(batches)
    engine.step()
    engine.backward(0.0)
    engine.step()
    assert ran == [("backward", 0), ("step", 0), ("backward", 1), ("step", 1)]


def test_a_second_step_is_refused_with_the_rule_and_the_way_out():
    engine, ran = driven()
    next(engine.passes())
    engine.backward(0.0)
    engine.step()
    with pytest.raises(WindowError, match=r"^step\(\) without a backward\(\) before it: one step\(\) ends one pass; c"):
        engine.step()
    assert ran == [("backward", 0), ("step", 0)]


def test_a_backward_of_no_micro_batch_and_a_second_one_are_refused():
    engine, _ = driven()
    with pytest.raises(WindowError, match="without a new micro-batch"):
        engine.backward(0.0)
    next(engine.passes())
    engine.backward(0.0)
    with pytest.raises(WindowError, match=r"waits for its step\(\)"):
        engine.backward(0.0)


def test_a_micro_batch_that_is_left_out_is_refused():
    engine, _ = driven()
    with pytest.raises(WindowError, match=r"before the last had its backward\(\)"):
        list(engine.passes())


@pytest.mark.parametrize(
    ("function", "rule"),
    [("steps_twice", "step() without a backward() before it"), ("leaves_all_out", "before the last had its backward")],
)
def test_whole_windows_say_the_same_rule(function, rule):
    with pytest.raises(WindowError) as caught:
        steps(function)
    assert rule in str(caught.value)
