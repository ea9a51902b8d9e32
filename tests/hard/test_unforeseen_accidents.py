"""What raises in the middle of a step, what a loop does behind it, and several engines of other stages at once."""

import contextlib

import deepspeed
import pytest
import torch
from torch import nn

from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, Watched, config, distance, engine_of, weights_of
from tests.hard.unforeseen.oracle import RATE, Net, descent, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()

CALLER = {"boundary": "caller"}
MODES = ("rollouts", "caller")


def in_mode(case, **options):
    """An engine beside its oracle; the variant says who ends windows, and `ended` ends one where the caller does."""
    if not case.variant.startswith("caller"):
        return Watched(case.cell, **options)
    watched = Watched(case.cell, section=CALLER, **options)
    watched.oracle._closes_at = 10**9
    return watched


def ended(watched, index):
    """Run the pass `index`, the second of two in a window."""
    watched.engine.backward(watched.loss(index), rollouts=2)
    watched.noted(index)
    by_caller = watched.engine._self_settings.by_caller
    if not by_caller or index % 2:
        watched.engine.step()
    if by_caller and index % 2:
        watched.oracle.step()


class Breaking(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that raises in its second step, once."""

    def __init__(self, optimizer, errors):
        self._errors = errors
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch == 2 and self._errors:
            raise self._errors.pop()("of the scheduler")
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


def _broken(case, error):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = Breaking(optimizer, [error])
    by = lambda right: torch.optim.SGD(right.parameters(), lr=RATE, momentum=0.9)  # noqa: E731
    given = {"optimizer": optimizer, "lr_scheduler": schedule}
    watched = in_mode(case, model=model, given=given, by=by, optimizer=False)
    for index in (0, 1):
        ended(watched, index)
    watched.engine.save_checkpoint(case.folder, tag="one")
    try:
        for index in (2, 3):
            ended(watched, index)
    except error:
        return watched
    raise AssertionError("the scheduler has not raised")


AFTER = ("finish", "step", "backward", "save")


@play.refused(
    STAGES,
    {f"{mode}-{after}": ("WindowError: ", "CheckpointError: ")[after == "save"] for mode in MODES for after in AFTER},
)
def a_step_raises_and_the_loop_goes_on(case):
    """Behind the optimizer's step, by the scheduler: nobody knows what has been done of it."""
    watched, after = _broken(case, ValueError), case.variant.split("-")[1]
    weights = weights_of(watched.engine)
    try:
        if after == "finish":
            watched.engine.finish()
        elif after == "step":
            watched.engine.step()
        elif after == "backward":
            watched.engine.backward(watched.loss(4), rollouts=2)
        else:
            watched.engine.save_checkpoint(case.folder, tag="two")
    finally:
        assert distance(weights_of(watched.engine), weights) == 0.0


@play.right(CELLS, [f"{mode}-{name}" for mode in MODES for name in ("error", "interrupt")])
def a_step_raises_and_a_checkpoint_is_loaded(case):
    """The one of the step before; the window runs once more."""
    watched = _broken(case, KeyboardInterrupt if case.variant.endswith("interrupt") else ValueError)
    watched.engine.load_checkpoint(case.folder, tag="one")
    # The oracle starts anew: it has no checkpoints.
    by = lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)  # noqa: E731
    fresh = type(watched.oracle)(Net(), 8, optimizer=by)
    if case.variant.startswith("caller"):
        fresh._closes_at = 10**9
    watched.oracle = fresh
    for index in (0, 1):
        watched.noted(index)
    if case.variant.startswith("caller"):
        fresh.step()
    for index in range(2, 8):
        ended(watched, index)
    return watched.found()


class Interrupts(torch.autograd.Function):
    """Has a backward in which somebody presses Ctrl-C."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyboardInterrupt


@play.refused(STAGES, dict.fromkeys(MODES, "WindowError: window 0 has a backward()"))
def a_backward_is_interrupted_and_the_loop_finishes(case):
    """On all ranks at once, as the launcher passes Ctrl-C on."""
    watched = in_mode(case)
    with contextlib.suppress(KeyboardInterrupt):
        watched.engine.backward(Interrupts.apply(watched.loss(0)), rollouts=2)
    watched.engine.finish()


@play.refused([one for one in CELLS if one.stage], "WindowError: window 1 has a backward()")
def a_block_is_interrupted_and_the_loop_finishes(case):
    """Inside coalesce_grad_reduction(), behind a first backward."""
    watched = in_mode(type(case)(case.scenario, case.cell, "caller"))
    for index in (0, 1):
        ended(watched, index)
    with contextlib.suppress(KeyboardInterrupt), watched.engine.coalesce_grad_reduction():
        watched.engine.backward(watched.loss(2), rollouts=2)
        raise KeyboardInterrupt
    watched.engine.finish()


@play.right([Cell(one) for one in range(4)], [str(other) for other in range(4)])
def actor_critic_and_reference_take_turns(case):
    """The critic, of another stage, ends its own windows; the reference is whole or on ZeRO 3."""
    actor = Watched(case.cell)
    critic = Watched(Cell(int(case.variant)), model=Net(5), section=CALLER)
    critic.oracle._closes_at = 10**9
    plain = {**config(Cell(3 if case.cell.stage % 2 else 0), optimizer=False)}
    reference = engine_of(plain, Net(9), model_parameters=None)
    told = []
    for index in range(9):
        with torch.no_grad():
            told.append(float(reference(*actor.inputs(index))))
        first, second = actor.loss(index), critic.loss(index, 1)
        critic.engine.backward(second, rollouts=1)
        critic.noted(index, 1)
        actor.engine.backward(first, rollouts=2)
        actor.noted(index)
        if index % 3 == 1:
            weights_of(critic.engine)
        actor.engine.step()
        with torch.no_grad():
            actor.engine.eval()
            actor.loss(40 + index)
            actor.engine.train()
        if index % 3 == 2:
            critic.engine.step()
            critic.oracle.step()
    right = [float(Net(9)(*sample(actor.rank, index, 2))) for index in range(9)]
    found, other = actor.found(), critic.found()
    return Found(max(found.apart, other.apart), [*found.got, *other.got, *told], [*found.right, *other.right, *right])


class Late(Net):
    """Has a branch that is used from some pass on."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(6, 8)

    def forward(self, x, y, late=False):
        hidden = torch.tanh(self.body(x) + (self.branch(x) if late else 0.0))
        return (self.head(hidden).squeeze(-1) - y).pow(2).mean()


@play.right(CELLS, [f"{mode}-{clip}" for mode in MODES for clip in ("0.0", "0.3")])
def a_first_gradient_comes_in_window_3(case):
    """Of a branch, on all ranks; from then on every pass uses it."""
    watched = in_mode(case, model=Late(), clip=float(case.variant.split("-")[1]))
    for index in range(12):
        late = index >= 6
        watched.engine.backward(watched.loss(index, 2, late), rollouts=2)
        watched.noted(index, more=(late,))
        if not case.variant.startswith("caller") or index % 2:
            watched.engine.step()
        if case.variant.startswith("caller") and index % 2:
            watched.oracle.step()
    return watched.found()


@play.right(CELLS, ["caller", "caller-block"])
def parameters_rest_in_windows_of_the_caller(case):
    """The head's bias, in every second window."""
    if case.variant.endswith("block") and not case.cell.stage:
        return Found()
    watched = in_mode(case)
    resting = dict(watched.engine.module.named_parameters())["head.bias"]
    mirrored = dict(watched.oracle.model.named_parameters())["head.bias"]
    for window in range(4):
        resting.requires_grad_(window % 2 == 0)
        mirrored.requires_grad_(window % 2 == 0)
        block = watched.engine.coalesce_grad_reduction() if case.variant.endswith("block") else contextlib.nullcontext()
        with block:
            for index in range(2 * window, 2 * window + 2):
                watched.engine.backward(watched.loss(index), rollouts=2)
                watched.noted(index)
        watched.engine.step()
        watched.oracle.step()
    return watched.found()


@play.right(STAGES[:3], ["eager", "aot_eager"])
@play.refused(STAGES[3:], {"eager": "WindowError: a forward of a model that torch.compile() has given"})
def the_module_was_compiled_before(case):
    """torch.compile() gave the model; its backends run what they have traced; shapes change."""
    torch._dynamo.reset()
    model = torch.compile(Net(), backend=case.variant)
    watched = Watched(case.cell, model=model, right=Net())
    for index in range(8):
        watched.engine.backward(watched.loss(index, 1 + index % 3), rollouts=2)
        watched.engine.step()
        for rank in range(watched.ranks):
            x, y = (one.double() for one in sample(rank, index, 1 + index % 3))
            watched.oracle.add(2, lambda one, x=x, y=y: one(x, y))
        watched.oracle.end_pass(4)
    own = {name.removeprefix("_orig_mod."): value for name, value in weights_of(watched.engine).items()}
    return Found(distance(own, watched.oracle_weights()))


@play.right([Cell(0)], MODES)
def a_group_is_added_between_windows(case):
    """A layer that the optimizer was not given at first."""
    model = Net()
    given = {"optimizer": torch.optim.SGD(model.body.parameters(), lr=RATE)}
    watched = in_mode(case, model=model, given=given, optimizer=False, by=lambda one: descent(one.body))
    for index in range(8):
        if index == 4:
            group = {"params": list(watched.engine.module.head.parameters()), "lr": 0.5 * RATE}
            watched.engine.optimizer.add_param_group(group)
            right = {"params": list(watched.oracle.model.head.parameters()), "lr": 0.5 * RATE}
            watched.oracle.optimizer.add_param_group(right)
        ended(watched, index)
    return watched.found()


@play.right([Cell(3), Cell(3, offload=True)], MODES)
def weights_are_gathered_between_passes(case):
    """The whole model, with a forward of its module inside, as generate() does; a row of it is read on each rank."""
    watched = in_mode(case, zero={"stage3_param_persistence_threshold": 0})
    for index in range(8):
        parameters = list(watched.engine.module.parameters())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters):
            watched.engine.module.predicted(sample(0, index, 3)[0])
        ended(watched, index)
    return watched.found()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
