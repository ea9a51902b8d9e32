"""Pipelines with experts of DeepSpeed's MoE on different ranks: the norm, and columns that run other numbers."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_parity
from ds_parity import MicroBatch
from ds_parity.all_weights import every_weight
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import on_four_ranks
from tests.distributed.test_model_parts import Mpu
from tests.distributed.test_pipelines import alone_in_the_process, config, squares

pytestmark = pytest.mark.ranks
WIDTH, RATE = 4, 0.5


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Experts(nn.Module):
    """Two experts, one on each of two columns."""

    def __init__(self):
        super().__init__()
        sizes = {"capacity_factor": 2.0, "eval_capacity_factor": 2.0, "min_capacity": 0}
        self.of_all = MoE(WIDTH, Expert(), num_experts=2, ep_size=2, k=1, use_rts=False, **sizes)

    def forward(self, x):
        return x + self.of_all(x)[0]


def build(stage, clip, later=Experts):
    torch.manual_seed(dist.get_rank() % 2)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Experts), LayerSpec(later), LayerSpec(nn.Linear, WIDTH, 1)]
    model = deepspeed.PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=squares)
    for number, parameter in enumerate(model.parameters()):
        # What all columns have is alike on them, and experts differ.
        own = dist.get_rank() % 2 if not getattr(parameter, "allreduce", True) else 0
        made = torch.Generator().manual_seed(10 * number + own)
        parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=made))
    parameters = in_groups([{"params": list(model.parameters()), "name": "all"}])
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    extended = config(stage, gradient_clipping=clip)
    del extended["optimizer"], extended["scheduler"]
    return ds_parity.initialize(model=model, optimizer=optimizer, config=extended)[0]


def micro_batches(engine, many):
    column = engine.grid.get_data_parallel_id()
    made = (torch.Generator().manual_seed(10 * column + number) for number in range(many[column]))
    inputs = [torch.randn(3, WIDTH, generator=one).to(engine.device) for one in made]
    return [MicroBatch({"inputs": x, "labels": x[:, :1]}, rollouts=1, tokens=3) for x in inputs]


def stepped(stage, clip):
    engine = build(stage, clip)
    record = engine.train_window(micro_batches(engine, [2, 2]))
    weights = torch.cat([one.values.double() for one in every_weight(engine.module)])
    dense = torch.cat([p.detach().flatten() for p in engine.module.parameters() if getattr(p, "allreduce", True)])
    parts = [torch.empty_like(dense) for _ in range(2)]
    dist.all_gather(parts, dense, group=engine.grid.get_data_parallel_group())
    apart = (parts[0] - parts[1]).abs().max().item()
    engine.destroy()
    deepspeed.utils.groups.mpu = None
    return record.grad_norm, weights, apart


@on_four_ranks
@alone_in_the_process
def with_experts(folder):
    """The norms on ZeRO 0 and 1, how far weights are from each other, and those of columns.

    Then what columns with other numbers of micro-batches end in: with experts on both stages, and on the first alone.
    """
    norm, weights, apart = stepped(0, 0.3)
    sharded, others, _ = stepped(1, 0.3)
    found = {"clipped": from_all([norm, sharded, (weights - others).abs().max().item(), apart])}
    engine, grid = build(0, 0.0), deepspeed.utils.groups.mpu
    deepspeed.utils.groups.mpu = Mpu()  # as an engine leaves it that is built now
    found["an mpu since"] = from_all(refusal(lambda: engine.train_window(micro_batches(engine, [2, 2]))))
    deepspeed.utils.groups.mpu = grid
    engine.train_window(micro_batches(engine, [2, 2]))
    engine.destroy()
    deepspeed.utils.groups.mpu = None
    for name, later in (("both", Experts), ("the first", Expert)):
        engine = build(0, 0.0, later)
        found[name] = from_all(refusal(lambda: engine.train_window(micro_batches(engine, [1, 3]))))  # noqa: B023
        engine.destroy()
        deepspeed.utils.groups.mpu = None
    return found


def test_the_norm_is_that_of_all_stages_and_of_all_experts(four_ranks):
    """ZeRO 1 is the reference, which adds up what each rank steps in bare DeepSpeed, too."""
    for norm, sharded, off, apart in four_ranks.of(with_experts)["clipped"]:
        assert norm > 0.3  # else nothing is clipped
        assert norm == pytest.approx(sharded, rel=1e-5)
        assert off < 1e-5
        assert apart == 0


def test_an_mpu_that_divides_models_is_refused_where_it_has_come_since(four_ranks):
    for said in four_ranks.of(with_experts)["an mpu since"]:
        assert said.startswith("ConfigError: an engine with DeepSpeed's MoE layer, while the mpu of")


@pytest.mark.parametrize("name", ["both", "the first"])
def test_columns_with_experts_of_each_other_run_as_many_micro_batches(four_ranks, name):
    for said in four_ranks.of(with_experts)[name]:
        assert said.startswith("WindowError: train_window() was given other numbers of micro-batches")
        assert "1 of data-parallel rank 0, 3 of data-parallel rank 1" in said
