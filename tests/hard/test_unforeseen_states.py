"""What loops do to an engine's state beside training it: move it, copy it, load it, let it go."""

import gc
import json
from pathlib import Path

import deepspeed
import pytest
import torch

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, Watched, config, engine_of, weights_of
from tests.hard.unforeseen.oracle import RATE, Net
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()


def momentum(model):
    """An optimizer with a state, which steps by the size of a gradient."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def with_momentum(cell):
    """An engine with the caller's optimizer beside its oracle."""
    model = Net()
    return Watched(cell, model=model, by=momentum, optimizer=False, given={"optimizer": momentum(model)})


@play.right([Cell(1), Cell(2)], ["between", "inside"])
def states_are_moved_to_the_host_and_back(case):
    """By offload_states() and reload_states(). DeepSpeed has none on ZeRO 0, and asks for its FusedAdam on ZeRO 3."""
    watched = with_momentum(case.cell)
    for index in range(8):
        watched.passes([index])
        if (watched.engine.window.passes == 0) == (case.variant == "between"):
            watched.engine.offload_states()
            watched.engine.reload_states()
    return watched.found()


@play.right(STAGES)
def weights_are_averaged_and_evaluated(case):
    """Behind each pass: a moving average of the weights, evaluation, and a reference model in a bare engine."""
    watched = with_momentum(case.cell)
    plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    reference = deepspeed.initialize(model=Net(seed=9), config=plain)[0]
    average = weights_of(watched.engine)
    for index in range(12):
        with torch.no_grad():
            reference(*watched.inputs(index))
            watched.engine.module.eval()
            watched.loss(index)
            watched.engine.module.train()
        watched.passes([index])
        now = weights_of(watched.engine)
        average = {name: 0.9 * one + 0.1 * now[name] for name, one in average.items()}
    return watched.found([all(bool(one.isfinite().all()) for one in average.values())], [True])


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as those are that look ahead."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = (
            inner,
            inner.param_groups,
            inner.state,
            inner.defaults,
        )
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.inner.step()
        self.inner.zero_grad()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)

    def __repr__(self):
        return "Wrapper"


@play.right([Cell(1), Cell(2), Cell(3)])
@play.refused([Cell(0)], "WindowError: gradients were changed outside of engine.backward()")
def an_optimizer_wraps_another(case):
    """It zeroes gradients of its own accord, and the loop has both zero them before each pass.

    On ZeRO 0 the inner one, of which the engine knows nothing, drops what was counted.
    """
    model = Net()
    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=RATE))
    watched = Watched(case.cell, model=model, optimizer=False, given={"optimizer": wrapper})
    for index in range(8):
        wrapper.zero_grad()
        wrapper.inner.zero_grad()
        watched.passes([index])
    return watched.found([wrapper.steps], [4])


CHANGES = {
    "halved": lambda one: one.grad.mul_(0.5),
    "replaced": lambda one: setattr(one, "grad", 0.5 * one.grad),
    "clipped-by-norm": lambda one: torch.nn.utils.clip_grad_norm_([one], 1e9),
    "clipped-by-value": lambda one: torch.nn.utils.clip_grad_value_([one], 1e9),
}


@play.refused([Cell(0)], dict.fromkeys(CHANGES, "WindowError: gradients were changed outside of engine.backward()"))
def gradients_are_changed_before_the_step(case):
    """By the loop, between the backward of a boundary and its step, where ZeRO 0 lets it see them."""
    watched = Watched(case.cell)
    for index in range(2):
        watched.engine.backward(watched.loss(index), rollouts=2)
        if watched.engine.is_gradient_accumulation_boundary():
            for one in watched.engine.module.parameters():
                CHANGES[case.variant](one)
        watched.engine.step()


@play.right(CELLS)
def gradients_are_zeroed_between_windows(case):
    """By engine, module and optimizer; the mode changes with every pass."""
    watched = Watched(case.cell)
    for index in range(8):
        watched.engine.module.train(index % 2 == 0)
        watched.passes([index])
        if watched.engine.window.passes == 0:
            watched.engine.zero_grad()
            watched.engine.optimizer.zero_grad(set_to_none=index % 4 == 1)
            watched.engine.module.zero_grad(set_to_none=True)
    return watched.found()


@play.right([Cell(0)])
def weights_are_loaded_between_windows(case):
    """Into the module; on the other stages DeepSpeed steps from the weights that it keeps itself."""
    watched, other = Watched(case.cell), Net(seed=5)
    watched.passes(range(4))
    watched.engine.module.load_state_dict(other.state_dict())
    watched.oracle.model.load_state_dict(other.state_dict())
    watched.passes(range(4, 8))
    return watched.found()


@play.right(STAGES, ["step", "drop"])
def epochs_end_inside_windows(case):
    """Three streams of uneven ranks, an LR by rollouts, and a trace: what closes an epoch counts, or leaves no mark."""
    trace, progress = Path(f"{case.folder}-trace.jsonl"), 0
    section = {"last_window": case.variant, "lr_progress": "rollout", "trace": str(trace)}
    watched = Watched(case.cell, section=section, given={"lr_scheduler": _falling})
    rates = []
    for epoch, counts in enumerate(((7, 4), (3, 6), (5, 5))):
        stream = [
            ds_parity.MicroBatch({"index": 20 * epoch + index}, rollouts=2) for index in range(counts[watched.rank])
        ]
        for batch in watched.engine.passes(stream, lookahead=epoch):
            watched.engine.backward(watched.loss(batch.inputs["index"]))
            watched.engine.step()
        for index in range(max(counts) + 1):
            progress = sum(watched.oracle.steps)
            watched.oracle.optimizer.param_groups[0]["lr"] = RATE / (1 + progress / 8)
            if index < max(counts):
                watched.noted(20 * epoch + index, *(2 if index < count else 0 for count in counts))
            else:
                watched.oracle.drop() if case.variant == "drop" else watched.oracle.finish()
            if sum(watched.oracle.steps) > progress:
                rates.append(RATE / (1 + progress / 8))
    found = Found(watched.apart(), [watched.engine.global_steps], [len(rates)])
    if watched.rank == 0:
        lines = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
        stepped = [line for line in lines if not line["skipped"]]
        found.got += [[line["rollouts"] for line in stepped], *(line["lr"][0] for line in stepped)]
        found.right += [watched.oracle.steps, *rates]
    return found


@play.right(STAGES, ["finish", "passes", "checkpoint"])
def epochs_repeat_their_windows(case):
    """Each epoch ends with a window that has a surplus; the next one has the same windows of 8, 4 and 8 rollouts."""
    watched = Watched(case.cell, target=6)
    for epoch in range(3):
        if case.variant == "passes":
            for batch in watched.engine.passes(ds_parity.MicroBatch({"index": i}, rollouts=2) for i in range(5)):
                watched.engine.backward(watched.loss(batch.inputs["index"]))
                watched.engine.step()
                watched.noted(batch.inputs["index"])
        else:
            watched.passes(range(5))
            watched.engine.finish()
        watched.oracle.finish()
        if case.variant == "checkpoint":
            watched.engine.save_checkpoint(case.folder, str(epoch))
            watched.engine.load_checkpoint(case.folder)
    return watched.found([watched.oracle.steps], [[8, 4, 8] * 3])


@play.right(STAGES)
def a_run_that_was_stopped_keeps_its_surplus(case):
    """Stopped behind a window of 8 rollouts for a target of 6, finished and saved: a new engine begins with 4."""
    watched = Watched(case.cell, target=6)
    for batch in watched.engine.passes(ds_parity.MicroBatch({"index": i}, rollouts=2) for i in range(5)):
        watched.engine.stop()
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
        watched.noted(batch.inputs["index"])
    watched.engine.finish()
    watched.engine.save_checkpoint(case.folder, "stopped")
    watched.engine = engine_of(config(case.cell, 6), Net(seed=1))
    watched.engine.load_checkpoint(case.folder)
    watched.passes(range(2, 5))
    return watched.found([watched.oracle.steps], [[8, 4, 8]])


def _falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _alive():
    gc.collect()
    return sum(type(one) is deepspeed.DeepSpeedEngine for one in gc.get_objects())


@play.right(STAGES)
def engines_are_let_go(case):
    """Four in turn, trained for three passes and destroyed: as many live on as of DeepSpeed's own, or fewer."""
    live = {}
    for kind in ("bare", "wrapped"):
        before = _alive()
        for number in range(4):
            _used_up(case, kind, seed=number)
        live[kind] = _alive() - before
    return Found(got=[live["wrapped"] <= live["bare"], live], right=[True, live])


def _used_up(case, kind, seed):
    model, extended = Net(seed=seed), config(case.cell, 4)
    if kind == "wrapped":
        engine = engine_of(extended, model)
    else:
        del extended["ds_parity"], extended["gradient_accumulation_passes"]
        engine = deepspeed.initialize(model=model, config=extended, model_parameters=list(model.parameters()))[0]
    x, y = torch.ones(2, 6, device=engine.device), torch.ones(2, device=engine.device)
    for _ in range(3):
        engine.backward(engine(x, y), **({"rollouts": 2} if kind == "wrapped" else {}))
        engine.step()
    if kind == "wrapped":
        engine.finish()
    engine.destroy()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
