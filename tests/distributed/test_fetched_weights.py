"""ZeRO 3 that gathers weights by all-reduce: steps are those of an oracle, whatever lies in the padding of weights."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running import weights
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

RATE, PASSES, WINDOWS = 0.1, 4, 2
# Weights of up to 1 in bf16 are rounded by up to 2 ** -9 in the beginning, and what is computed with them likewise.
PRECISIONS = {"fp32": ({}, 1e-6), "bf16": ({"bf16": {"enabled": True}}, 2**-8)}
# From this size on parameters are divided: all of them, or none.
SIZES = (0, 10**6)


def model():
    """Two ranks divide none of its weights and biases evenly."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def sample(seed):
    """One of a pass and rank."""
    return torch.randn(1, 5, generator=torch.Generator().manual_seed(seed))


def oracle():
    """The weights after all windows, in float64 on one process."""
    trained = model().double()
    for window in range(WINDOWS):
        losses = [trained(sample(PASSES * window + number).double()).pow(2).mean() for number in range(PASSES)]
        gradients = torch.autograd.grad(sum(losses) / PASSES, list(trained.parameters()))
        for one, gradient in zip(trained.parameters(), gradients, strict=True):
            one.data.sub_(RATE * gradient)
    return weights.vector(trained)


def distance(keys, size):
    """How far an engine's weights are from the oracle's at most."""
    made = {**config(3, passes=PASSES), **keys, "gradient_clipping": 0.0}
    made["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    made.pop("scheduler")
    made["zero_optimization"] |= {
        "stage3_use_all_reduce_for_fetch_params": True,
        "stage3_param_persistence_threshold": size,
    }
    engine, *_ = ds_parity.initialize(model=(trained := model()), model_parameters=trained.parameters(), config=made)
    if dist.get_rank() == dist.get_world_size() - 1:
        for one in engine.module.parameters():
            part = one.ds_tensor
            padding = part.ds_numel * dist.get_world_size() - one.ds_numel
            part.data[part.ds_numel - padding :] = 1e3
    for number in range(WINDOWS * PASSES // 2):
        inputs = sample(2 * number + dist.get_rank()).to(engine.device, next(engine.module.parameters()).dtype)
        engine.backward(engine(inputs).float().pow(2).mean(), rollouts=1)
        engine.step()
    assert engine.last_step.step == WINDOWS
    found = (weights.vector(engine.module).double().cpu() - oracle().double()).abs().max().item()
    engine.destroy()
    return found


@on_two_ranks
def fetched(folder):
    return {
        f"{name} {size}": from_all(distance(keys, size)) for name, (keys, _) in PRECISIONS.items() for size in SIZES
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_those_of_an_oracle(two_ranks, precision, size):
    assert max(two_ranks.of(fetched)[f"{precision} {size}"]) <= PRECISIONS[precision][1]
