"""Experts on different ranks, clipped by the norm of all, with a parameter without dimensions; and beside an mpu."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups
from deepspeed.utils import groups
from torch import nn

import ds_parity
from tests.distributed.cells import config, runs_forward
from tests.distributed.engines import from_all, refusal
from tests.distributed.sequence import remembering
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_model_parts import Mpu, with_mpu
from tests.distributed.test_pipelines import alone_in_the_process

pytestmark = pytest.mark.ranks
WIDTH = 4


class Scaled(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full(shape, 1.5))

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.scale


class Net(nn.Module):
    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        sizes = {"capacity_factor": 2.0, "eval_capacity_factor": 2.0, "min_capacity": 0}
        self.experts = MoE(WIDTH, Scaled(shape), num_experts=2, ep_size=2, k=1, use_rts=False, **sizes)
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts.deepspeed_moe.gate.wg.weight.data.copy_(torch.randn(2, WIDTH))

    def forward(self, x):
        return self.experts(self.first(x))[0]


class OfOnePart(Mpu):
    SIZE = 1


def engine_of(shape, mpu=None, **keys):
    model = Net(shape)
    parameters = in_groups([{"params": list(model.parameters()), "name": "all"}])
    made = {**config(0, passes=2), "gradient_clipping": 0.1, **keys}
    del made["optimizer"], made["scheduler"]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return ds_parity.initialize(model=model, optimizer=optimizer, config=made, mpu=mpu)[0]


def norms_of(shape, mpu=None):
    """The norm of each of three steps, and a weight that all ranks have behind each."""
    engine, found = engine_of(shape, mpu), []
    model = engine.module
    for number in range(3):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        engine.backward((engine(x.to(engine.device)) - 3).square().mean())
        engine.step()
        found.append([engine.last_step.grad_norm, model.first.weight.flatten().tolist()])
    engine.destroy()
    return found


@on_two_ranks
@alone_in_the_process
def scaled_experts(folder):
    return from_all([norms_of(()), norms_of((1,))])


def test_all_ranks_clip_by_the_norm_of_all_experts(two_ranks):
    first, second = two_ranks.of(scaled_experts)
    assert first == second
    for scalar, vector in zip(*first, strict=True):
        assert scalar[0] == pytest.approx(vector[0], rel=1e-6)
        assert scalar[1] == pytest.approx(vector[1], rel=1e-6)
        assert scalar[0] > 0.1


@on_two_ranks
@alone_in_the_process
def experts_beside_an_mpu(folder):
    alone = norms_of((1,))
    with with_mpu():
        return from_all([alone, norms_of((1,), OfOnePart())])


def test_so_they_do_beside_an_mpu_that_divides_nothing(two_ranks):
    first, second = two_ranks.of(experts_beside_an_mpu)
    assert first == second
    assert first[0] == first[1]


@on_two_ranks
@alone_in_the_process
def experts_among_ranks_of_one_model(folder):
    """What is said where the layer would take other tokens for the same."""
    x, said = torch.ones(6, WIDTH), {}
    with remembering() as mpu:
        said["slices of a sequence"] = refusal(lambda: engine_of((1,), mpu, sequence_parallel_size=2))
    with with_mpu() as mpu:
        engine = engine_of((1,))
        groups.mpu = mpu  # as an engine leaves it that is built now
        said["a forward"] = refusal(lambda: engine(x))
        said["a backward past the engine"] = refusal(lambda: engine.backward(engine.module.first(x).mean()))
        groups.mpu = None
        engine.backward(engine(x).mean())
        engine.step()
        engine.destroy()
        said["forwards alone"] = refusal(
            lambda: ds_parity.initialize(model=Net((1,)), config=runs_forward(config(0)), mpu=mpu)
        )
    return from_all(said)


@pytest.mark.parametrize("name", ["slices of a sequence", "a forward", "a backward past the engine", "forwards alone"])
def test_tokens_of_ranks_that_have_one_model_or_sequence_are_not_dropped(two_ranks, name):
    for said in two_ranks.of(experts_among_ranks_of_one_model):
        assert said[name].startswith("ConfigError: an engine with DeepSpeed's MoE layer, while the mpu of deepspeed")
