"""A forward in front of the last step, a scheduler of another optimizer, and groups of other stages: all refused."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, SequentialLR

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import build, forward, from_all, one_pass, perceptron, refusal
from tests.distributed.sets import on_four_ranks, on_two_ranks

pytestmark = pytest.mark.ranks
KINDS = [
    (stage, kind) for kind in ("fp32", "bf16", "offload") for stage in (0, 1, 2, 3) if (stage or kind != "offload")
]


def _config(stage, kind):
    more = {"bf16": {"bf16": {"enabled": True}}}.get(kind, {})
    found = {**config(stage, passes=4), **more}
    if kind == "offload":
        found["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        found["zero_force_ds_cpu_optimizer"] = False
    return found


def _loss(engine, seed, kind):
    if kind != "bf16":
        return forward(engine, seed)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(engine.device, torch.bfloat16)
    return engine(x).float().pow(2).mean()


@on_two_ranks
def forwards_before_a_step(folder):
    """For each kind: the answer to a forward ahead of its window, to one behind a step, and the steps of both."""
    results = {}
    for stage, kind in KINDS:
        engine = build(_config(stage, kind))
        ahead = [_loss(engine, seed, kind) for seed in (1, 2)]
        for loss in ahead:  # of one window: two forwards, then two backwards
            engine.backward(loss, rollouts=1)
            engine.step()
        late = _loss(engine, 3, kind)
        for seed in (4, 5):
            engine.backward(_loss(engine, seed, kind), rollouts=1)
            engine.step()
        before = engine.last_step.step
        said = refusal(functools.partial(engine.backward, late, rollouts=1))
        results[f"{stage} {kind}"] = [before, from_all(said)]
    return results


@pytest.mark.parametrize(("stage", "kind"), KINDS)
def test_a_forward_in_front_of_the_last_step_is_refused(two_ranks, stage, kind):
    steps, said = two_ranks.of(forwards_before_a_step)[f"{stage} {kind}"]
    assert steps == 2
    for one in said:
        assert one.startswith("WindowError: backward() needs what was changed in place since its forward"), one
        assert "its forward must run behind the last step(), and its backward before the next" in one


def _chained(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.5)], [2])


@on_two_ranks
def schedulers_of_other_optimizers(folder):
    """What is said of each scheduler, and the rates of an engine whose scheduler is its optimizer's own."""
    results = {}
    for name, make in {"plain": lambda it: ExponentialLR(it, 0.5), "chained": _chained}.items():
        for stage in (0, 1, 3):
            model = perceptron()
            optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
            plain = config(stage, passes=2)
            build_with = functools.partial(_built, model, plain)
            for where, given in (("given", optimizer), ("section", None)):
                results[f"{name} {stage} {where}"] = refusal(functools.partial(build_with, given, make(other)))
            engine = build_with(optimizer, make(optimizer))
            for seed in (1, 2, 3):
                one_pass(engine, seed, rollouts=1)
            results[f"{name} {stage} rates"] = [engine.last_step.lr[0], make(other).get_last_lr()[0]]
    return results


def _built(model, plain, optimizer, scheduler):
    plain = {key: value for key, value in plain.items() if key != "optimizer" or optimizer is None}
    engine, *_ = ds_parity.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=plain)
    return engine


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["plain", "chained"])
def test_a_scheduler_of_another_optimizer_is_refused(two_ranks, name, stage):
    found = two_ranks.of(schedulers_of_other_optimizers)
    for where, has in (("given", "that initialize() is given"), ("section", "of the section `optimizer`")):
        said = found[f"{name} {stage} {where}"]
        assert said.startswith("ConfigError: lr_scheduler= is a"), said
        assert "over another optimizer (SGD)" in said
        assert has in said
    assert found[f"{name} {stage} rates"][0] > 0


class _Halves:
    """An mpu of two groups of two ranks, each with data and an engine of its own."""

    def __init__(self):
        self.halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.alone = [dist.new_group([rank]) for rank in range(4)]

    def get_data_parallel_group(self):
        return self.halves[dist.get_rank() // 2]

    def get_data_parallel_world_size(self):
        return 2

    def get_data_parallel_rank(self):
        return dist.get_rank() % 2

    def get_model_parallel_group(self):
        return self.alone[dist.get_rank()]

    def get_model_parallel_world_size(self):
        return 1

    def get_model_parallel_rank(self):
        return 0


@on_four_ranks
def groups_of_ranks(folder):
    """Two groups of ranks build engines at once: what each rank says, by the stages of both; or the steps it takes."""
    mpu, results = _Halves(), {}
    for stages in ((1, 3), (3, 0), (3, 3), (0, 2)):
        stage = stages[dist.get_rank() // 2]

        def trained(stage=stage):
            engine = build(config(stage, passes=2), mpu=mpu)
            for seed in range(3):
                one_pass(engine, seed + 10 * dist.get_rank(), rollouts=1)
            raise ds_parity.WindowError(f"{engine.last_step.step} steps")

        results[str(stages)] = from_all(refusal(trained))
    return results


def test_groups_of_ranks_that_build_at_once_need_one_stage_where_one_is_3(four_ranks):
    """DeepSpeed's stage 3 waits for all ranks; the other group would wait elsewhere, for ever."""
    found = four_ranks.of(groups_of_ranks)
    for stages in ((3, 3), (0, 2)):
        assert found[str(stages)] == ["WindowError: 3 steps"] * 4
    for stages in ((1, 3), (3, 0)):
        for rank, said in enumerate(found[str(stages)]):
            own, other = stages[rank // 2], stages[1 - rank // 2]
            assert said.startswith(
                f"RankDesyncError: zero_optimization.stage is {own} on this rank's group and {other} on another group"
            )
