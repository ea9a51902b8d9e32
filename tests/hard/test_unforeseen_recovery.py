"""Loops that catch an error and go on, and calls at times that nobody planned: right, or refused on every rank."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

from tests.hard.unforeseen.cells import STAGES, Cell, Found, Watched, config, engine_of
from tests.hard.unforeseen.oracle import RATE, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()

CALLER = {"boundary": "caller"}


class Called(Watched):
    """An engine whose caller ends the windows, beside its oracle; `end()` ends one."""

    def __init__(self, cell, section=None, **options):
        super().__init__(cell, section={**CALLER, **(section or {})}, **options)
        self.oracle._closes_at = 10**9

    def end(self):
        self.engine.step()
        self.oracle.step()

    def one(self, index, size=2):
        self.engine.backward(self.loss(index, size), rollouts=size)
        self.noted(index, size)


class Breaks(torch.autograd.Function):
    """Has a backward that raises, as one does for which there is no memory."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("none left")


@play.refused(STAGES, "WindowError: window 0 has a backward() that was counted and then raised")
def every_backward_runs_out_of_memory(case):
    """The loop catches it, calls step() and goes on with the next micro-batch: the window lacks a gradient."""
    _out_of_memory(case, range(2))


@play.refused([Cell(0), Cell(1)], ("RankDesyncError: this rank stops because another did", "WindowError: window 0 has"))
def one_backward_runs_out_of_memory(case):
    """On rank 1. From ZeRO 2 on the other rank waits in its reduction, up to exchange_timeout."""
    _out_of_memory(case, [1])


def _out_of_memory(case, ranks):
    watched = Watched(case.cell)
    loss = watched.loss(0)
    with contextlib.suppress(MemoryError):
        watched.engine.backward(Breaks.apply(loss) if watched.rank in ranks else loss, rollouts=2)
    for index in (1, 2, 3):
        watched.engine.step()
        watched.engine.backward(watched.loss(index), rollouts=2)
    watched.engine.step()


@play.right(STAGES)
def a_checkpoint_is_loaded_behind_a_backward_that_raised(case):
    """It is the way out that the message names."""
    watched = Watched(case.cell, target=4)
    watched.passes(range(2))
    watched.engine.save_checkpoint(case.folder, "saved")
    try:
        watched.engine.backward(Breaks.apply(watched.loss(5)), rollouts=1)
    except MemoryError:
        watched.engine.load_checkpoint(case.folder, "saved")
    watched.passes(range(6, 9))
    return watched.found()


@play.refused(STAGES, ("RankDesyncError: this rank stops because another did", "WindowError: backward() got a float"))
def one_rank_has_no_loss(case):
    """A Python float, on rank 1; the other hears of it at once."""
    watched = Watched(case.cell, section={"exchange_timeout": 30.0})
    loss, begun = watched.loss(0), time.monotonic()
    try:
        watched.engine.backward(float(loss) if watched.rank else loss, rollouts=2)
    finally:
        took = time.monotonic() - begun
        assert took < 10, took


@play.refused([Cell(1), Cell(2), Cell(3)], "WindowError: coalesce_grad_reduction() inside another")
def a_block_stands_in_another(case):
    """Of one window."""
    watched = Called(case.cell)
    with watched.engine.coalesce_grad_reduction():
        watched.one(0)
        with watched.engine.coalesce_grad_reduction():
            watched.one(1)


@play.refused([Cell(1)], "WindowError: coalesce_grad_reduction() inside no_sync()")
def a_block_stands_in_no_sync(case):
    """ZeRO 2 and 3 have no no_sync()."""
    watched = Called(case.cell)
    with watched.engine.no_sync(), watched.engine.coalesce_grad_reduction():
        watched.one(0)


@play.right([Cell(1), Cell(2), Cell(3)])
def a_block_follows_backwards_of_its_window(case):
    """Two backwards before the block and one inside."""
    watched = Called(case.cell)
    for window in range(3):
        watched.one(10 * window)
        watched.one(10 * window + 1)
        with watched.engine.coalesce_grad_reduction():
            watched.one(10 * window + 2)
        watched.end()
    return watched.found()


@play.refused([Cell(1), Cell(2), Cell(3)], "CheckpointError: load_checkpoint() inside")
def a_checkpoint_is_loaded_inside_a_block(case):
    """Behind a backward."""
    watched = Called(case.cell)
    watched.one(0)
    watched.end()
    watched.engine.save_checkpoint(case.folder, "saved")
    with watched.engine.coalesce_grad_reduction():
        watched.engine.backward(watched.loss(50), rollouts=2)
        watched.engine.load_checkpoint(case.folder, "saved")


@play.right(STAGES, ["rollouts", "caller"])
def the_scheduler_is_replaced(case):
    """By another one, under which the rate still follows the rollouts."""
    watched = Watched(case.cell, 4, section={"lr_progress": "rollout"}, given={"lr_scheduler": _falling})
    rates = []
    for index in range(4):
        if index == 2:
            watched.engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                watched.engine.basic_optimizer, lambda step: 1.0 / (1 + step)
            )
        watched.engine.backward(watched.loss(index, 6), rollouts=6)
        watched.engine.step()
        rates.append(float(watched.engine.get_lr()[0]))
    # 12 rollouts a window are three nominal steps.
    right = [RATE / 4, RATE / 7, RATE / 10, RATE / 13]
    return Found(0.0, rates, right)


def _falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@play.right(STAGES)
def the_scheduler_is_stepped_by_the_loop(case):
    """Where it follows the rollouts, a loop that steps it, also before the first window, changes nothing."""
    watched = Watched(case.cell, 4, section={"lr_progress": "rollout"}, given={"lr_scheduler": _falling})
    rates = []
    watched.engine.lr_scheduler.step()
    for index in range(3):
        watched.engine.backward(watched.loss(index, 6), rollouts=6)
        watched.engine.step()
        watched.engine.lr_scheduler.step()
        rates.append(float(watched.engine.get_lr()[0]))
    return Found(0.0, rates, [RATE / 4, RATE / 7, RATE / 10])


@play.right(STAGES)
def a_run_goes_on_with_windows_by_rollouts(case):
    """From a checkpoint of windows that the caller ended, of 4 and 10 rollouts beside a nominal target of 8."""
    called = Called(case.cell)
    called.one(0)
    called.end()
    called.one(1, 5)
    called.end()
    called.engine.save_checkpoint(case.folder, "saved")
    watched = Watched(case.cell)
    watched.oracle.model.load_state_dict(called.oracle.model.state_dict())
    watched.engine.load_checkpoint(case.folder, "saved")
    watched.passes(range(2, 8), 1)
    found = watched.found()
    return Found(found.apart, found.got[:2], found.right[:2])


def _of_another_stage(case):
    saved = Watched(Cell(int(case.variant)), target=4)
    saved.passes(range(2))
    saved.engine.save_checkpoint(case.folder, "saved")
    watched = Watched(case.cell, target=4)
    watched.oracle.model.load_state_dict(saved.oracle.model.state_dict())
    watched.engine.load_checkpoint(case.folder, "saved")
    watched.passes(range(2, 4))
    found = watched.found()
    return Found(found.apart, found.got[:2], found.right[:2])


@play.refused([Cell(0)], dict.fromkeys("123", "CheckpointError: "))
def a_checkpoint_of_partitions(case):
    """Of another stage."""
    _of_another_stage(case)


@play.refused([Cell(1), Cell(2)], dict.fromkeys("03", "CheckpointError: "))
def a_checkpoint_of_stage_0_or_3(case):
    """On a stage between."""
    _of_another_stage(case)


@play.refused([Cell(3)], dict.fromkeys("012", "CheckpointError: "))
def a_checkpoint_of_whole_weights(case):
    """On ZeRO 3."""
    _of_another_stage(case)


@play.right([Cell(1), Cell(2)], "12")
def a_checkpoint_of_stage_1_or_2(case):
    """DeepSpeed has one format for both."""
    return _of_another_stage(case)


@play.refused(STAGES, {"backward": "WindowError: the engine was destroyed", "step": "WindowError: the engine was"})
def an_engine_is_used_behind_its_end(case):
    """A backward, and a step() that a backward before the end waits for."""
    watched = Watched(case.cell, target=4)
    watched.passes(range(2))
    if case.variant == "step":
        watched.engine.backward(watched.loss(2), rollouts=2)
    watched.engine.destroy()
    if case.variant == "step":
        watched.engine.step()
    else:
        watched.engine.backward(watched.loss(2), rollouts=2)


@play.refused([Cell(0)], {"offload": "ConfigError: ", "reload": "ConfigError: "})
def states_are_moved_where_they_can_not_be(case):
    watched = Watched(case.cell)
    watched.passes(range(2))
    watched.engine.offload_states() if case.variant == "offload" else watched.engine.reload_states()


@play.refused([Cell(2)], {"list": "CheckpointError: ", "text": "CheckpointError: "})
def what_is_no_client_state(case):
    Watched(case.cell).engine.save_checkpoint(case.folder, client_state={"list": [1], "text": "a"}[case.variant])


@play.right([Cell(0), Cell(2)])
def a_term_by_passes_beside_a_weight_of_its_own(case):
    """A micro-batch without rollouts and tokens that weighs something is no idle pass."""
    terms = {"a": {"weight": "weight"}, "b": {"weight": "pass"}}
    engine = engine_of(config(case.cell, section={**CALLER, "terms": terms}))
    loss = engine(torch.ones(2, 6), torch.ones(2))
    engine.expect(rollouts=0, passes=1, weight={"a": 0.5})
    engine.backward({"a": loss, "b": 2 * loss}, rollouts=0, weight={"a": 0.5})
    engine.step()
    value, metrics = float(loss), engine.last_step.metrics
    return Found(0.0, [engine.last_step.loss, metrics["a"], metrics["b"]], [3 * value, value, 2 * value])


@play.right(STAGES)
def a_dropped_window_was_promised_more(case):
    """What is reported of it is the mean over what it contains."""
    terms = {"a": {"weight": "rollout"}, "b": {"weight": "token", "coefficient": 0.5}}
    watched = Called(case.cell, section={"terms": terms, "last_window": "drop"})
    watched.engine.expect(rollouts=8, tokens=40)
    loss = watched.loss(0, 2)
    watched.engine.backward({"a": loss, "b": loss.square()}, rollouts=2, tokens=3)
    watched.engine.finish()
    both = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(both, loss.detach().cpu().reshape(1))
    right = float(sum(both)) / 2 + 0.5 * float(sum(one.square() for one in both)) / 2
    return Found(0.0, [watched.engine.last_step.loss], [right])


@play.right([Cell(0), Cell(1), Cell(3)])
def gradients_are_reduced_by_the_loop(case):
    """Behind a step(), engine.allreduce_gradients() is of no effect; on ZeRO 2 it is refused."""
    watched = Watched(case.cell)
    for index in range(4):
        watched.passes([index])
        watched.engine.allreduce_gradients()
    return watched.found()


@play.right([Cell(0), Cell(1), Cell(3)], ["rollouts", "caller"])
def windows_without_weight_are_reduced_by_the_loop(case):
    """Every other window has no token: no step is taken for it, and nothing of it enters the next."""
    watched = (Called if case.variant == "caller" else Watched)(case.cell, section={"loss_weight": "token"})
    watched.oracle._closes_at = 10**9
    for index in range(8):
        tokens = 3 if index // 2 % 2 else 0
        watched.engine.backward(watched.loss(index), rollouts=2, tokens=tokens)
        for rank in range(watched.ranks) if tokens else ():
            x, y = (one.double() for one in sample(rank, index, 2))
            watched.oracle.add(tokens, lambda model, x=x, y=y: model(x, y))
        if case.variant == "rollouts" or index % 2:
            watched.engine.step()
            watched.engine.allreduce_gradients()
        if index % 2:
            watched.oracle.step()
    return Found(watched.apart(), [watched.engine.global_steps], [2])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
