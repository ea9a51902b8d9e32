"""What a caller who ends windows may do and may not: errors on every rank, nothing lost, checkpoints, records."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import STAGES
from tests.distributed.engines import from_all, perceptron, refusal
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_loop_shapes import RATE, extended, loss_of, weights

pytestmark = pytest.mark.ranks


def engine_of(stage, kind="fp32", **section):
    config = {**extended(stage, kind), "ds_parity": {"boundary": "caller", **section}}
    del config["gradient_accumulation_passes"]
    model = perceptron()
    client = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), optimizer=client, config=config)[0]


def one_backward(engine, seed, rollouts=1, **counts):
    return engine.backward(loss_of(engine, engine, seed + dist.get_rank()), rollouts=rollouts, **counts)


def a_window(engine, seed, sizes=(1, 2)):
    for number, rollouts in enumerate(sizes):
        one_backward(engine, seed + 10 * number, rollouts)
    engine.step()


def step_without_a_backward(engine, marked=False):
    """Refused everywhere, and the next window is right."""
    a_window(engine, 1)
    if marked:
        engine.set_gradient_accumulation_boundary(True)
    said = from_all(refusal(engine.step))
    a_window(engine, 2)
    return [said, engine.last_step.step, engine.last_step.rollouts, engine.last_step.passes]


def marked_without_a_backward(engine):
    """The same where a last backward was announced and none ran."""
    return step_without_a_backward(engine, marked=True)


def backward_after_the_last(engine):
    engine.set_gradient_accumulation_boundary(False)
    one_backward(engine, 1)
    engine.set_gradient_accumulation_boundary(True)
    foretold = engine.is_gradient_accumulation_boundary()
    one_backward(engine, 2)
    said = from_all(refusal(lambda: one_backward(engine, 3)))
    engine.step()
    return [said, foretold, engine.last_step.passes, engine.is_gradient_accumulation_boundary()]


def saving_inside(engine):
    """ZeRO 0 and 1: on one rank alone a window is open."""
    if engine.zero_optimization_stage() > 1 or dist.get_rank() == 0:
        one_backward(engine, 1)
    said = from_all(refusal(lambda: engine.save_checkpoint("nowhere")))
    engine.step()
    return [said, engine.last_step.rollouts]


def recording(engine):
    for number in range(3):
        one_backward(engine, number, tokens=5)
        engine.record("reward", torch.tensor([float(dist.get_rank()), 3.0]))
    own = engine.window
    engine.step()
    last = engine.last_step
    return [
        [own.passes, own.rollouts, own.tokens],
        [last.passes, last.rollouts, last.tokens, last.metrics["reward"]],
        [engine.micro_steps, engine.global_samples, engine.global_steps],
    ]


def stopping(engine):
    if dist.get_rank():
        engine.stop()
    before = engine.stopping
    a_window(engine, 1)
    return from_all([before, engine.stopping])


class BrokenError(Exception):
    """What a loop may catch."""


def backward_that_raises(engine):
    """On one rank: it was counted, so nothing may be added to its window, until it is thrown away."""

    def broken(_):
        raise BrokenError

    a_window(engine, 1)
    loss = loss_of(engine, engine, 1)
    said = "nothing was raised"
    if dist.get_rank() == 0:
        loss.register_hook(broken)
        try:
            engine.backward(loss, rollouts=1)
        except BrokenError:
            said = refusal(lambda: engine.backward(loss_of(engine.module, engine, 1), rollouts=1))
    return from_all(said)


def ending(engine, rule):
    """The data ends inside a window, whose backwards are on one rank alone."""
    a_window(engine, 1)
    if engine.zero_optimization_stage() > 1 or dist.get_rank():
        one_backward(engine, 5)
    said = from_all(refusal(engine.finish))
    last = engine.last_step
    return [said, last.step, last.skipped, last.rollouts, weights(engine)]


def step_after_a_refused_end(engine):
    """`last_window: error` names step() as the way out, and it is one."""
    trained = []
    for refused in (True, False):
        for seed in (5, 6):  # the very first window, and one that has a total before it
            # ZeRO 0 and 1: on one rank alone.
            if engine.zero_optimization_stage() > 1 or dist.get_rank() == 0:
                one_backward(engine, seed, 3)
            if refused:
                said = from_all(refusal(engine.finish))
            one_backward(engine, 10 * seed, 2)
            engine.step()
        engine.finish()
        last = engine.last_step
        trained.append(weights(engine))
        if refused:
            stage = engine.zero_optimization_stage()
            engine.destroy()
            engine = engine_of(stage, last_window="error")
    return [said, trained, last.step, last.passes]


PLAYS = {
    play.__name__: play
    for play in (
        step_without_a_backward,
        marked_without_a_backward,
        backward_after_the_last,
        saving_inside,
        recording,
        stopping,
    )
}


def past_an_empty_window(stage, kind, empty):
    """The weights after two windows, with an empty one between them whose last backward was announced, and without."""
    engine = engine_of(stage, kind)
    a_window(engine, 1)
    if empty:
        engine.set_gradient_accumulation_boundary(True)
        engine.idle(loss_of(engine, engine, 5))
        engine.step()
    for number, rollouts in enumerate((1, 3)):
        one_backward(engine, 2 + 10 * number, rollouts)
    engine.step()
    trained = weights(engine)
    engine.destroy()
    return trained


def resumed(stage, folder):
    """Six windows at once, and three of them in an engine that was loaded: the weights of both."""
    whole = engine_of(stage)
    for window in range(3):
        a_window(whole, window, (1, 2 + window))
    whole.save_checkpoint(f"{folder}/{stage}", tag="saved")
    one_backward(whole, 77)  # an open window is thrown away by loading
    whole.load_checkpoint(f"{folder}/{stage}", tag="saved")
    again = engine_of(stage)
    again.load_checkpoint(f"{folder}/{stage}", tag="saved")
    for window in range(3, 6):
        for engine in (whole, again):
            a_window(engine, window, (3, 2 + window))
    results = [[weights(engine), engine.last_step.step, engine.micro_steps] for engine in (whole, again)]
    for engine in (whole, again):
        engine.destroy()
    return results


@on_two_ranks
def windows_of_callers(folder):
    """By stage and play: what came of it."""
    results = {}
    for stage in STAGES:
        for name, play in PLAYS.items():
            engine = engine_of(stage)
            results[f"{stage} {name}"] = play(engine)
            engine.destroy()
        for rule in ("step", "drop", "error"):
            engine = engine_of(stage, last_window=rule)
            results[f"{stage} {rule}"] = ending(engine, rule)
            engine.destroy()
        engine = engine_of(stage, last_window="error")
        results[f"{stage} after a refused end"] = step_after_a_refused_end(engine)
        engine.destroy()
        for kind in ("fp32", "offload") if stage else ("fp32",):
            past = [past_an_empty_window(stage, kind, empty) for empty in (True, False)]
            results[f"{stage} {kind} empty"] = past[0] == past[1]
        results[f"{stage} resumed"] = resumed(stage, folder)
        if stage < 2:  # the others would wait in their own backward
            engine = engine_of(stage)
            results[f"{stage} raised"] = backward_that_raises(engine)
            engine.destroy()
    return results


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("play", ["step_without_a_backward", "marked_without_a_backward"])
def test_a_step_without_a_backward_is_refused_on_every_rank_and_loses_nothing(two_ranks, stage, play):
    said, *last = two_ranks.of(windows_of_callers)[f"{stage} {play}"]
    assert all(one.startswith("WindowError: step() in window 1 without a backward()") for one in said), said
    assert last == [2, 6, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_added_after_the_backward_that_was_announced_as_the_last(two_ranks, stage):
    said, foretold, passes, after = two_ranks.of(windows_of_callers)[f"{stage} backward_after_the_last"]
    assert all(one.startswith("WindowError: backward() in window 0 after its last one") for one in said), said
    assert (foretold, passes, after) == (True, 2, False)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_inside_a_window_is_refused(two_ranks, stage):
    said, rollouts = two_ranks.of(windows_of_callers)[f"{stage} saving_inside"]
    assert all(one.startswith("CheckpointError: save_checkpoint() inside window 0") for one in said), said
    assert rollouts == (1 if stage < 2 else 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_is_recorded_over_all_ranks(two_ranks, stage):
    own, last, counters = two_ranks.of(windows_of_callers)[f"{stage} recording"]
    assert own == [3, 3, 15]
    assert last == [3, 6, 30, pytest.approx(1.75)]
    assert counters == [3, 6, 1]


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_to_stop_travels_with_the_step(two_ranks, stage):
    assert two_ranks.of(windows_of_callers)[f"{stage} stopping"] == [[False, True]] * 2


@pytest.mark.parametrize("rule", ["step", "drop", "error"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_window_that_the_data_ends_in_is_settled_as_the_key_says(two_ranks, stage, rule):
    said, step, skipped, rollouts, trained = two_ranks.of(windows_of_callers)[f"{stage} {rule}"]
    if rule == "error":
        assert all("ds_parity.last_window is 'error'" in one for one in said), said
        assert step == 1
    else:
        assert said == ["nothing was raised"] * 2
        assert (step, skipped, rollouts) == (2, rule == "drop", 1 if stage < 2 else 2)
        other = two_ranks.of(windows_of_callers)[f"{stage} error"][-1]
        assert (trained == other) is (rule == "drop")


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_whose_end_was_refused_is_ended_by_its_step(two_ranks, stage):
    said, trained, *last = two_ranks.of(windows_of_callers)[f"{stage} after a refused end"]
    assert all("ds_parity.last_window is 'error'" in one for one in said), said
    assert last == [2, 2]
    # Ranks meet earlier in the first window, and divide by another number until it is corrected.
    for own, right in zip(*trained, strict=True):
        assert own == pytest.approx(right, abs=1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_bit_for_bit_from_its_checkpoint(two_ranks, stage):
    whole, again = two_ranks.of(windows_of_callers)[f"{stage} resumed"]
    assert again == whole
    assert whole[1:] == [6, 12]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_backward_that_raised_is_not_counted_twice(two_ranks, stage):
    said, other = two_ranks.of(windows_of_callers)[f"{stage} raised"]
    assert said.startswith("WindowError: window 1 has a backward() that was counted and then raised"), said
    assert other == "nothing was raised"


@pytest.mark.parametrize(("stage", "kind"), [(s, k) for s in STAGES for k in ("fp32", "offload") if s or k == "fp32"])
def test_an_empty_window_leaves_nothing_behind(two_ranks, stage, kind):
    assert two_ranks.of(windows_of_callers)[f"{stage} {kind} empty"] is True
