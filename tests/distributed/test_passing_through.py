"""A backward that brings the engine no gradient leaves it, and what flows through, as they are.

Those of torch.autograd.grad (adversarial inputs, a gradient penalty), and of another engine's loss (a GAN).
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_parity
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import from_all
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_loop_shapes import weights

pytestmark = pytest.mark.ranks
RATE, PASSES = 0.1, 2  # on each rank, so that DeepSpeed is told of several


class Net(nn.Module):
    def __init__(self, seed, width=5):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(width, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def adversarial(model, x, _):
    """The loss of inputs that have been moved along their gradient."""
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).pow(2).mean(), x)
    return model((x + 3 * gradient).detach()).pow(2).mean()


def penalised(model, x, _):
    """A loss with the norm of a gradient in it, which is derived once more."""
    x = x.requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.pow(2).mean() + (gradient.norm() - 1).pow(2)


def balanced(model, x, _):
    """GradNorm's: the norms of the gradients of two losses, by a parameter, weigh them."""
    out = model(x)
    losses = out[:, :2].pow(2).mean(), out[:, 2:].abs().mean()
    weight = (model.module if hasattr(model, "module") else model).second.weight
    norms = [torch.autograd.grad(one, weight, retain_graph=True)[0].norm() for one in losses]
    return sum(one * norm.detach() for one, norm in zip(losses, norms, strict=True))


def judged(model, x, judge):
    """A loss that comes through another model, whose parameters stand still."""
    return judge(model(x)).pow(2).mean()


LOSSES = {"adversarial": adversarial, "penalised": penalised, "balanced": balanced, "judged": judged}
# ZeRO 3 releases weights while a backward runs: a second one through the same graph is torch's own error there.
CELLS = [(stage, name) for stage in STAGES for name in LOSSES if stage != 3 or name in ("adversarial", "judged")]


def built(model, stage):
    extended = {**config(stage, passes=2 * PASSES), "gradient_clipping": 0.0, "scheduler": {"type": None}}
    extended["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    return ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=extended)[0]


def sample(rank, index):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * rank + index))


def trained(stage, name, judging):
    """How far three steps end from those of an fp64 oracle; the engine that judges is on any stage."""
    loss, model, judge = LOSSES[name], Net(0), Net(1)
    alone, judging_alone = copy.deepcopy(model).double(), copy.deepcopy(judge).double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    engine, other = built(model, stage), built(judge, judging)
    other.module.requires_grad_(False)
    for index in range(3 * PASSES):
        engine.backward(loss(engine, sample(dist.get_rank(), index).to(engine.device), other))
        engine.step()
        for rank in range(2):
            (loss(alone, sample(rank, index).double(), judging_alone) / (2 * PASSES)).backward()
        if (index + 1) % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()
    right = torch.cat([one.detach().flatten() for one in alone.parameters()])
    got = torch.tensor([one for row in weights(engine) for one in row], dtype=torch.float64)
    apart = float((got - right).abs().max())
    steps = engine.global_steps
    engine.destroy()
    other.destroy()
    return apart, steps


@on_two_ranks
def passed_through(folder):
    return {f"{stage} {name}": from_all(trained(stage, name, 3 - stage)) for stage, name in CELLS}


@pytest.mark.parametrize(("stage", "name"), CELLS)
def test_the_steps_are_those_of_plain_torch(two_ranks, stage, name):
    for apart, steps in two_ranks.of(passed_through)[f"{stage} {name}"]:
        assert apart < 1e-6
        assert steps == 3


@on_two_ranks
def functional(folder):
    """By stage, how far torch.func.grad through the engine is from that through the module."""
    found = {}
    for stage in (0, 1, 2):
        engine = built(Net(0), stage)
        x = sample(dist.get_rank(), 0).to(engine.device)
        one, other = (torch.func.grad(lambda x, f=f: f(x).pow(2).mean())(x) for f in (engine, engine.module))
        found[str(stage)] = from_all(float((one - other).abs().max()))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_functional_gradient_is_that_of_the_module(two_ranks, stage):
    assert two_ranks.of(functional)[stage] == [0.0, 0.0]


@on_two_ranks
def through_one_that_only_runs_forward(folder):
    """An engine without an optimizer, on the stages that it may have: a reward model."""
    found = {}
    for stage in (0, 3):
        judge = Net(1).requires_grad_(False)
        extended = {**config(stage), "scheduler": {"type": None}}
        del extended["optimizer"], extended["scheduler"]
        other = ds_parity.initialize(model=judge, config=extended)[0]
        x = sample(dist.get_rank(), 0).to(other.device).requires_grad_()
        other(x).pow(2).mean().backward()
        alone = Net(1).double()
        y = sample(dist.get_rank(), 0).double().requires_grad_()
        alone(y).pow(2).mean().backward()
        found[str(stage)] = from_all(float((x.grad.cpu() - y.grad).abs().max()))
    return found


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_gradient_flows_through_a_model_that_only_runs_forward(two_ranks, stage):
    assert max(two_ranks.of(through_one_that_only_runs_forward)[stage]) < 1e-6
