"""Loops and models that nobody planned for step as an fp64 oracle does, or are refused on every rank."""

import contextlib

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, Watched
from tests.hard.unforeseen.oracle import WIDTH, Net, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()


@play.right(CELLS)
def ragged_windows_are_clipped(case):
    """Ranks bring 1 to 3 rollouts in turn, and the gradient's norm is clipped."""
    watched = Watched(case.cell, 12, clip=0.5)
    for index in range(6):
        sizes = [1 + (rank + index) % 3 for rank in range(watched.ranks)]
        size = sizes[watched.rank]
        watched.engine.backward(watched.loss(index, size), rollouts=size)
        watched.engine.step()
        watched.noted(index, *sizes)
    found = watched.found()
    return Found(
        found.apart, [*found.got, watched.engine.last_step.grad_norm], [*found.right, watched.oracle.norms[-1]]
    )


@play.right(CELLS)
def evaluation_changes_the_mode(case):
    """eval(), a forward without a graph, and train(): between forward, backward and step, of engine and of module."""
    watched = Watched(case.cell, 12)

    def evaluate(owner):
        owner.eval()
        with torch.no_grad():
            owner(*watched.inputs(50))
        owner.train()

    for index in range(6):
        loss = watched.loss(index)
        evaluate(watched.engine)
        watched.engine.backward(loss, rollouts=2)
        evaluate(watched.engine.module)
        watched.engine.step()
        evaluate(watched.engine)
        watched.noted(index)
    return watched.found()


class Checkpointed(Net):
    """Recomputes its hidden layer in the backward."""

    reentrant = False

    def predicted(self, x):
        x = x.clone().requires_grad_()  # a reentrant one asks for an input that takes a gradient
        hidden = checkpoint(lambda part: torch.tanh(self.body(part)), x, use_reentrant=self.reentrant)
        return self.head(hidden).squeeze(-1)


class Reentrant(Checkpointed):
    """The same, with a backward inside the backward."""

    reentrant = True


class Penalised(Net):
    """Adds the gradient by its inputs to its loss, so that the backward runs through a gradient."""

    def forward(self, x, y):
        x = x.clone().requires_grad_()
        predicted = self.predicted(x)
        (gradient,) = torch.autograd.grad(predicted.sum(), x, create_graph=True)
        return (predicted - y).pow(2).mean() + gradient.pow(2).sum(-1).mean()


class Tied(Net):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def predicted(self, x):
        return super().predicted(self.second(torch.tanh(self.first(x))))


class Sine(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Custom(Net):
    """Uses it."""

    def predicted(self, x):
        return self.head(Sine.apply(self.body(x))).squeeze(-1)


class Normalised(Net):
    """Has buffers, which each forward changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def predicted(self, x):
        return self.head(self.norm(torch.tanh(self.body(x)))).squeeze(-1)


MODELS = {one.__name__: one for one in (Checkpointed, Reentrant, Tied, Custom, Normalised)}


@play.right(CELLS, MODELS)
def models_of_other_kinds(case):
    """A model whose backward is not a plain one, or that ties weights or has buffers."""
    kind = MODELS[case.variant]
    # torch.autograd.grad, by which the oracle goes, can't run a reentrant backward.
    watched = Watched(case.cell, model=kind(), right=(Checkpointed if kind is Reentrant else kind)())
    watched.passes(range(7), 8)  # few samples are divided by a small deviation, which makes more of their rounding
    return watched.found()


# On ZeRO 3 DeepSpeed 0.19.8 lets go of a weight when its backward has run: the second one ends in torch's error.
@play.right(STAGES[:3])
def one_forward_serves_two_passes(case):
    """retain_graph=True, and half of the loss once more."""
    watched = Watched(case.cell)
    for index in range(4):
        loss = watched.loss(index)
        for factor in (1.0, 0.5):
            watched.engine.backward(loss * factor, retain_graph=factor == 1.0, rollouts=2)
            watched.engine.step()
            watched.noted(index, factor=factor)
    return watched.found()


@play.right(CELLS, ["forward", "backward"])
def the_body_raises_and_goes_on(case):
    """An error of the user's on all ranks, behind a forward or behind a backward."""
    watched = Watched(case.cell)
    for index in range(8):
        with contextlib.suppress(ValueError):
            loss = watched.loss(index)
            if (index, case.variant) == (3, "forward"):
                raise ValueError("of the user's")
            watched.engine.backward(loss, rollouts=2)
            watched.noted(index)
            if (index, case.variant) == (3, "backward"):
                raise ValueError("of the user's")
            watched.engine.step()
        if (index, case.variant) == (3, "backward"):
            watched.engine.step()
    return watched.found()


@play.right(CELLS)
def two_engines_take_turns_in_one_loop(case):
    """Both have passes() of their own, and the second steps before the first."""
    first, second = Watched(case.cell), Watched(case.cell, model=Net(seed=1))
    streams = [
        one.engine.passes(ds_parity.MicroBatch({"index": index}, rollouts=2) for index in indices)
        for one, indices in ((first, range(8)), (second, range(20, 28)))
    ]
    for own, other in zip(*streams, strict=True):
        first.engine.backward(first.loss(own.inputs["index"]))
        second.engine.backward(second.loss(other.inputs["index"]))
        second.engine.step()
        first.engine.step()
        first.noted(own.inputs["index"])
        second.noted(other.inputs["index"])
    one, two = first.found(), second.found()
    return Found(max(one.apart, two.apart), one.got + two.got, one.right + two.right)


@play.right(CELLS)
def idle_passes_are_nan(case):
    """What idle() runs is NaN, and so is the mean over a micro-batch of no samples."""
    watched = Watched(case.cell, 10)
    for index in range(6):
        sizes = [0 if rank == index % 2 else 3 for rank in range(watched.ranks)]
        if sizes[watched.rank]:
            watched.engine.backward(watched.loss(index, 3), rollouts=3)
        elif index < 3:
            x, y = watched.inputs(index)
            watched.engine.idle(watched.engine(x * float("nan"), y))
        else:
            watched.engine.backward(watched.loss(index, 0), rollouts=0)
        watched.engine.step()
        watched.noted(index, *sizes)
    return watched.found()


@play.right(STAGES)
def a_window_has_hundreds_of_passes(case):
    """600 rollouts in 150 passes, whose losses are divided long before the window ends."""
    watched = Watched(case.cell, 600)
    watched.passes(range(160))
    return watched.found()


@play.right(CELLS)
def finish_is_called_again_and_again(case):
    """Before the first pass, twice behind an open window, and behind passes() of nothing."""
    watched = Watched(case.cell)
    said = [watched.engine.finish(), watched.engine.finish()]
    watched.passes(range(3))
    said += [watched.engine.finish(), watched.engine.finish()]
    watched.oracle.finish()
    watched.passes(range(3, 6))
    list(watched.engine.passes(iter([])))
    steps = [one and one.step for one in said]
    return watched.found([steps], [[None, None, 2, 2]])


@play.right([Cell(3), Cell(3, offload=True)], ["born", "later"])
def weights_are_really_partitioned(case):
    """The model is born under zero.Init, or nothing of it stays in one piece."""
    plain = Net()
    if case.variant == "born":
        with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
            model = Net()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for own, right in zip(model.parameters(), plain.parameters(), strict=True):
                own.data.copy_(right.data)
        watched = Watched(case.cell, model=model, right=plain)
    else:
        limits = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_prefetch_bucket_size")
        watched = Watched(case.cell, zero=dict.fromkeys(limits, 0))
    watched.passes(range(6))
    return watched.found()


# On ZeRO 3 DeepSpeed 0.19.8 has not gathered the weight that a gradient in the forward needs: torch's error.
@play.right([one for one in CELLS if one.stage < 3])
def a_loss_contains_a_gradient(case):
    """The gradient by the inputs is a part of the loss, so that the backward runs through a gradient."""
    watched = Watched(case.cell, model=Penalised())
    watched.passes(range(7))
    return watched.found()


class Subclass(torch.Tensor):
    """A tensor of another class."""


LOSSES = {
    "two-forwards": lambda model, x, y: model(x, y) + 0.5 * model(x, 0.5 * y),
    "fp64": lambda model, x, y: model(x, y).double(),
    "negative": lambda model, x, y: -model(x, y),
    "of-shape-1-1": lambda model, x, y: model(x, y)[None, None],
    "subclass": lambda model, x, y: model(x, y).as_subclass(Subclass),
}


@play.right(STAGES, LOSSES)
def losses_of_other_kinds(case):
    """The sum of two forwards, and losses of other types, signs, shapes and classes."""
    watched, loss_of = Watched(case.cell), LOSSES[case.variant]
    for index in range(8):
        watched.engine.backward(loss_of(watched.engine, *watched.inputs(index)), rollouts=2)
        watched.engine.step()
        for rank in range(watched.ranks):
            x, y = (one.double() for one in sample(rank, index, 2))
            watched.oracle.add(2, lambda model, x=x, y=y: loss_of(model, x, y).squeeze())
        watched.oracle.end_pass(4)
    return watched.found()


NO_LOSSES = {
    "a-number": lambda loss: 1.5,
    "nothing": lambda loss: None,
    "tuple": lambda loss: (loss,),
    "dict": lambda loss: {"loss": loss},
    "no-graph": lambda loss: loss.detach(),
    "vector": lambda loss: loss.expand(3),
    "empty": lambda loss: loss[None][:0],
    "complex": lambda loss: loss * (1 + 0j),
}


@play.refused(STAGES, dict.fromkeys(NO_LOSSES, "WindowError: backward"))
def what_is_no_loss(case):
    """A thing that has no gradient, or no single one."""
    watched = Watched(case.cell)
    watched.engine.backward(NO_LOSSES[case.variant](watched.loss(0)), rollouts=2)


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses_what_is_no_loss(outcomes, case):
    outcomes.assert_refused(case)
