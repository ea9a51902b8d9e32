"""Calls in places where nobody planned for them."""

import contextlib

import pytest
import torch

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell
from tests.hard.unforeseen.scenarios import Scenarios
from tests.hard.unforeseen.whole_windows import Beside

play = Scenarios()


def batches(indices, rollouts=2):
    return [ds_parity.MicroBatch({"index": index}, rollouts=rollouts) for index in indices]


AHEAD = {
    "0": {"lookahead": 0},
    "4": {"lookahead": 4},
    "w": {"lookahead": "window"},
    "p": {"lookahead": 3, "prefetch": 2},
}


@play.right(STAGES, [f"{ahead}-{at}" for ahead in AHEAD for at in ("1", "2", "3")])
def finish_is_called_inside_passes(case):
    """Behind the first passes of a stream of 8, with what was announced still to come."""
    ahead, at = case.variant.split("-")
    watched = Beside(case.cell)
    for number, batch in enumerate(watched.engine.passes(batches(range(8)), **AHEAD[ahead]), 1):
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
        watched.has(batch.inputs["index"])
        if number == int(at):
            watched.engine.finish()
            watched.steps()
        elif len(watched.window) == 4:
            watched.steps()
    return watched.found()


LEFT = [f"{how}-{ahead}" for how in ("dropped", "broken", "closed") for ahead in ("0", "4", "p")]


@play.right([Cell(0), Cell(3)], [f"{how}-told" for how in LEFT])
@play.refused(STAGES, dict.fromkeys(LEFT, "WindowError: backward(loss) behind a passes() that was left"))
def a_pass_is_run_behind_its_generator(case):
    """The loop takes one micro-batch, lets go of passes(), and runs it: its counts are gone with the generator."""
    how, ahead, *told = case.variant.split("-")
    watched = Beside(case.cell)
    for index in range(4):
        if how == "dropped":
            batch = next(watched.engine.passes(batches([index]), **AHEAD[ahead]))
        elif how == "broken":
            for batch in watched.engine.passes(batches([index]), **AHEAD[ahead]):  # noqa: B007  # used behind it
                break
        else:
            stream = watched.engine.passes(batches([index]), **AHEAD[ahead])
            batch = next(stream)
            stream.close()
        watched.engine.backward(watched.loss(batch.inputs["index"]), **({"rollouts": batch.rollouts} if told else {}))
        watched.engine.step()
        watched.has(index)
        if index % 2:
            watched.steps()
    return watched.found()


@play.refused(STAGES, dict.fromkeys(AHEAD, "WindowError: backward(loss) behind a passes() that was left"))
def passes_stand_inside_passes(case):
    """The inner ones are run whole before the outer one's backward."""
    watched = Beside(case.cell)
    for batch in watched.engine.passes(batches(range(2)), **AHEAD[case.variant]):
        for inner in watched.engine.passes(batches(range(10, 13)), **AHEAD[case.variant]):
            watched.engine.backward(watched.loss(inner.inputs["index"]))
            watched.engine.step()
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
    return watched.found()


@play.right(STAGES, ["even", "uneven"])
def passes_feed_passes(case):
    """A critic takes its stream from the actor's passes."""
    actor, critic = Beside(case.cell), Beside(case.cell, 4)
    counts = (6, 6) if case.variant == "even" else (6, 3)
    stream = actor.engine.passes(batches(range(counts[actor.rank])), skip_idle=False)
    seen = []

    def fed():
        for batch in stream:
            actor.engine.backward(actor.loss(batch.inputs["index"]))
            actor.engine.step()
            yield batch

    for batch in critic.engine.passes(fed(), skip_idle=False):
        seen.append(batch.inputs["index"])
        critic.engine.backward(critic.loss(batch.inputs["index"]))
        critic.engine.step()
    for one, target in ((actor, 8), (critic, 4)):
        held = 0
        for index in range(6):
            weights = [2 * (index < count) for count in counts]
            one.has(index, *weights)
            held += sum(weights)
            if held >= target:
                one.steps()
                held -= target
    other = actor.found()
    return critic.found([other.apart < 1e-6, *other.got], [True, *other.right])


GRADLESS = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


QUIET = [f"{how}-{what}" for how in GRADLESS for what in ("all", "step")]
ON_3 = [one for one in CELLS if one.stage == 3]


@play.right([one for one in CELLS if one.stage < 3], QUIET)
@play.right(ON_3, [one for one in QUIET if one.startswith("no_grad")])
@play.refused(ON_3, {one: "WindowError: step() or finish() under torch.inf" for one in QUIET if one.startswith("inf")})
def everything_but_the_backward_is_called_without_gradients(case):
    """The first call of each is made there: step(), finish(), record(), expect(), group_advantages(), last_step."""
    how, what = case.variant.split("-")
    quiet = GRADLESS[how]
    around = quiet if what == "all" else contextlib.nullcontext
    watched = Beside(case.cell)
    engine, got = watched.engine, []
    with around():
        got += engine.group_advantages([1, 1], [0.0, 1.0])
        engine.expect(rollouts=4)
    for index in range(6):
        with quiet():
            engine.record("length", torch.ones(2) * index)
            engine.record("mean", torch.tensor(float(index)), 2)
        engine.backward(watched.loss(index), rollouts=2)
        engine.record("length", torch.ones(2))
        with quiet():
            engine.step()
        watched.has(index)
        if index % 2:
            watched.steps()
            with around():
                got += [engine.last_step.metrics["length"], engine.window.passes]
    with around():
        engine.finish()
    return watched.found(got, [-1.0, 1.0, 0.75, 0, 1.75, 0, 2.75, 0])


@play.right(CELLS, ["between", "inside", "before-step"])
def evaluations_keep_gradients(case):
    """Forwards whose graph nobody uses, in training and in eval(), without no_grad()."""
    watched = Beside(case.cell)
    for index in range(6):
        if case.variant == "inside" or (case.variant == "between" and index % 2 == 0):
            watched.engine.eval()
            float(watched.loss(50 + index))
            watched.engine.train()
            kept = watched.loss(60 + index)
        watched.engine.backward(watched.loss(index), rollouts=2)
        if case.variant == "before-step":
            kept = watched.loss(60 + index)
        watched.engine.step()
        watched.has(index)
        if index % 2:
            watched.steps()
    del kept
    return watched.found()


def called(case, **section):
    return Beside(case.cell, section={"boundary": "caller", **section})


@play.right(STAGES, ["taken-back", "twice", "alone", "then-finish"])
def the_last_backward_is_announced_oddly(case):
    watched = called(case)
    engine = watched.engine
    for number in range(3):
        if case.variant == "alone":  # and nothing has run
            engine.set_gradient_accumulation_boundary(True)
            with pytest.raises(ds_parity.WindowError):
                engine.step()
        for index in (2 * number, 2 * number + 1):
            if case.variant == "taken-back":
                engine.set_gradient_accumulation_boundary(True)
                engine.set_gradient_accumulation_boundary(False)
            elif case.variant == "twice" and index % 2:
                engine.set_gradient_accumulation_boundary(True)
                engine.set_gradient_accumulation_boundary(True)
            engine.backward(watched.loss(index), rollouts=2)
            watched.has(index)
        if case.variant == "then-finish":
            engine.set_gradient_accumulation_boundary(True)
            engine.finish()
        else:
            engine.step()
        watched.steps()
    return watched.found()


@play.right(STAGES, ["load", "twice", "stop", "save"])
@play.refused(STAGES, {"finish": "WindowError: window 1 contains 8 rollouts over all ranks, and expect() has said 80"})
def a_window_is_expected_and_something_else_comes(case):
    watched = called(case)
    engine = watched.engine
    engine.backward(watched.loss(0), rollouts=2)
    watched.has(0)
    engine.step()
    watched.steps()
    engine.save_checkpoint(case.folder, "a")
    engine.expect(rollouts=40)
    if case.variant == "finish":
        engine.finish()
    elif case.variant == "load":
        engine.load_checkpoint(case.folder, "a")
    elif case.variant == "twice":
        engine.expect(rollouts=4)
    elif case.variant == "stop":
        engine.stop()
        engine.load_checkpoint(case.folder, "a")
    else:
        engine.save_checkpoint(case.folder, "b")
        engine.load_checkpoint(case.folder, "b")
    for index in (1, 2):
        engine.backward(watched.loss(index), rollouts=2)
        watched.has(index)
    engine.step()
    watched.steps()
    return watched.found()


@play.right(STAGES, ["before", "inside", "twice"])
def a_stopped_engine_goes_on_by_hand(case):
    """passes() yields nothing any more; backward() and step() count on."""
    watched = Beside(case.cell)
    engine = watched.engine
    if case.variant == "before":
        engine.stop()
    for batch in engine.passes(batches(range(9)), lookahead=0):
        engine.backward(watched.loss(batch.inputs["index"]))
        engine.step()
        watched.has(batch.inputs["index"])
        if len(watched.window) == 4:
            watched.steps()
        if batch.inputs["index"] == 2:
            engine.stop()
            if case.variant == "twice":
                engine.stop()
    stopped = engine.global_steps
    assert list(engine.passes(batches(range(20, 24)))) == []
    for index in range(30, 33):
        engine.backward(watched.loss(index), rollouts=2)
        engine.step()
        watched.has(index)
        if len(watched.window) == 4:
            watched.steps()
    return watched.found([stopped], [len(watched.losses) - 1])


@play.right([Cell(0), Cell(2), Cell(3)], ["given"])
@play.refused([Cell(0), Cell(2)], {"seen": "WindowError: 1 of 2 ranks have no micro-batch at all"})
def rank_1_begins_with_nothing(case):
    """Its first micro-batches contain nothing and have no inputs, and real ones follow."""
    watched = Beside(case.cell)
    empty = [ds_parity.MicroBatch({}, rollouts=0) for _ in range(3)]
    own = batches(range(6)) if watched.rank == 0 else [*empty, *batches(range(3, 6))]
    idle = batches([90])[0] if case.variant == "given" else None
    for batch in watched.engine.passes(own, idle=idle):
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
    held = 0
    for index in range(6):
        watched.has(index, 2, 2 * (index > 2))
        held += 2 + 2 * (index > 2)
        if held >= 8:
            watched.steps()
            held -= 8
    return watched.found()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
