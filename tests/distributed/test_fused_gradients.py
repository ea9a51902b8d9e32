"""Functions of autograd that write to `w.grad` themselves, or give no gradient for a parameter, in passes that idle."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import STAGES
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_loop_shapes import extended, loss_of, micro_batches, weights

pytestmark = pytest.mark.ranks


class Accumulating(torch.autograd.Function):
    """A linear layer that adds to the gradient of its weight, as Megatron's fused accumulation does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        weight, own = ctx.weight, gradient.T @ ctx.saved_tensors[0]
        before = torch.zeros_like(weight) if weight.grad is None else weight.grad
        weight.grad = before + own
        return gradient @ weight, torch.zeros_like(weight)


class Giving(torch.autograd.Function):
    """A linear layer whose weight gets no gradient, though it requires one."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, None


class Layer(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = torch.nn.Parameter(torch.eye(8) * 0.5), function

    def forward(self, x):
        return self.function.apply(x, self.weight)


def built(function):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), Layer(function), torch.nn.Linear(8, 1))


def trained(stage, function, idle):
    """The weights after two windows, in which one rank, or each, may run a pass more that counts nothing."""
    model = built(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = ds_parity.initialize(model=model, optimizer=optimizer, config=extended(stage))
    for window in micro_batches(dist.get_rank()):
        for number, (seed, rollouts) in enumerate(window):
            first = 0
            if number == 1 and idle:
                # Where one rank idles, the other divides its micro-batch between two passes.
                first = 0 if idle == "each rank" or dist.get_rank() else 1
                engine.backward(loss_of(engine, engine, seed if first else 7), rollouts=first)
                engine.step()
            engine.backward(loss_of(engine, engine, seed), rollouts=rollouts - first)
            engine.step()
    result = weights(engine)
    engine.destroy()
    return result


CELLS = [*((stage, "writes") for stage in STAGES), (0, "gives none"), (1, "gives none")]
FUNCTIONS = {"writes": Accumulating, "gives none": Giving}


# DeepSpeed's own end there is an AttributeError of NoneType.
NAMED = "a function of autograd whose backward returns None for a parameter"
REFUSED = [(1, {"overlap_comm": True}), (2, {}), (3, {})]


def given_none(stage, zero):
    """What each rank is answered where a parameter is given None and DeepSpeed needs a gradient."""
    model, config = built(Giving), extended(stage)
    config["zero_optimization"] |= zero
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = ds_parity.initialize(model=model, optimizer=optimizer, config=config)
    # ZeRO 1 reduces in the boundary's backward alone.
    said = refusal(lambda: engine.backward(loss_of(engine, engine, 1), rollouts=10))
    engine.destroy()
    return from_all(said)


@on_two_ranks
def refused_gradients(folder):
    return [given_none(*cell) for cell in REFUSED]


@on_two_ranks
def refused_where_gradients_are_scattered(folder):
    """A task of its own: older releases refuse the key."""
    return given_none(2, {"contiguous_gradients": False})


@on_two_ranks
def fused(folder):
    return {
        f"{stage} {name}": {idle: trained(stage, FUNCTIONS[name], idle) for idle in ("", "each rank", "one rank")}
        for stage, name in CELLS
    }


@pytest.mark.parametrize("idle", ["each rank", "one rank"])
@pytest.mark.parametrize(("stage", "name"), CELLS)
def test_a_pass_that_counts_nothing_changes_nothing(two_ranks, stage, name, idle):
    cell = two_ranks.of(fused)[f"{stage} {name}"]
    for own, right in zip(cell[idle], cell[""], strict=True):
        assert own == pytest.approx(right, abs=2e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_a_function_writes_is_stepped(two_ranks, stage):
    start = built(Accumulating)[2].weight.flatten().tolist()
    assert two_ranks.of(fused)[f"{stage} writes"][""][2] != pytest.approx(start, abs=1e-3)


@pytest.mark.parametrize("at", range(len(REFUSED)))
def test_where_deepspeed_needs_a_gradient_the_function_that_gives_none_is_named(two_ranks, at):
    for said in two_ranks.of(refused_gradients)[at]:
        assert said.startswith("WindowError: one backward() brought")
        assert NAMED in said


def test_so_it_is_where_gradients_are_not_contiguous(two_ranks):
    for said in two_ranks.of(refused_where_gradients_are_scattered):
        assert said.startswith("WindowError: one backward() brought a parameter")
        assert NAMED in said
