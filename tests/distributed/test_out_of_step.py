"""A forward in front of the last step, a scheduler of another optimizer, and groups of other stages: all refused."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, SequentialLR
from torch.utils.checkpoint import checkpoint

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import build, from_all, one_pass, perceptron, refusal
from tests.distributed.sets import on_four_ranks, on_two_ranks

pytestmark = pytest.mark.ranks
CHECKPOINTED = {"checkpointed": False, "reentrant": True}
KINDS = [
    (stage, kind)
    for kind in ("fp32", "bf16", "offload", *CHECKPOINTED)
    for stage in (0, 1, 2, 3)
    if (stage or kind != "offload")
]


def _config(stage, kind):
    more = {"bf16": {"bf16": {"enabled": True}}}.get(kind, {})
    found = {**config(stage, passes=4), **more}
    if kind == "offload":
        found["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        found["zero_force_ds_cpu_optimizer"] = False
    return found


def _loss(engine, seed, kind):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    returned = engine(x.to(engine.device, torch.bfloat16 if kind == "bf16" else torch.float32))
    return (returned["outputs"][0] if kind in CHECKPOINTED else returned).float().pow(2).mean()


def one_pass_of(engine, seed, kind):
    engine.backward(_loss(engine, seed, kind), rollouts=1)
    engine.step()


class Recomputed(torch.nn.Module):
    """A model whose layers are all computed again in the backward, which then finds the new weights."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = perceptron(), reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return {"outputs": (x,)}


def _engine(stage, kind):
    if kind not in CHECKPOINTED:
        return build(_config(stage, kind))
    model = Recomputed(CHECKPOINTED[kind])
    engine, *_ = ds_parity.initialize(model=model, config=_config(stage, kind))
    return engine


@on_two_ranks
def forwards_before_a_step(folder):
    """For each kind: the answer to a forward ahead of its window, to one behind a step, and the steps of both."""
    results = {}
    for stage, kind in KINDS:
        engine = _engine(stage, kind)
        together = kind != "reentrant"  # two forwards of one block have one backward there, which is another matter
        ahead = [_loss(engine, seed, kind) for seed in (1, 2)[: 1 + together]]
        for loss in ahead:  # of one window: two forwards, then two backwards
            engine.backward(loss, rollouts=1)
            engine.step()
        if not together:
            one_pass_of(engine, 2, kind)
        late = _loss(engine, 3, kind)
        for seed in (4, 5):
            one_pass_of(engine, seed, kind)
        before = engine.last_step.step
        said = refusal(functools.partial(engine.backward, late, rollouts=1))
        results[f"{stage} {kind}"] = [before, from_all(said)]
    return results


@pytest.mark.parametrize(("stage", "kind"), KINDS)
def test_a_forward_in_front_of_the_last_step_is_refused(two_ranks, stage, kind):
    steps, said = two_ranks.of(forwards_before_a_step)[f"{stage} {kind}"]
    assert steps == 2
    for one in said:
        assert one.startswith("WindowError: backward() of a forward that ran before the last step(): 1 step(s)"), one
        assert "run each forward behind the last step(), and its backward before the next" in one


class Alike(torch.nn.Module):
    """Layers of one size, of which any may be frozen without a change of any buffer's length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@on_two_ranks
def frozen_apart(folder):
    """What is said where ranks freeze different layers between windows, and the steps where they freeze one."""
    results = {}
    for stage in (0, 1):
        for kind in ("fp32", "bf16"):
            for which in ("apart", "alike"):
                engine, *_ = ds_parity.initialize(model=Alike(), config=_config(stage, kind))
                for seed in (1, 2):
                    one_pass_of(engine, seed, kind)
                engine.module.layers[dist.get_rank() if which == "apart" else 1].weight.requires_grad_(False)
                one_pass_of(engine, 3, kind)
                engine.backward(_loss(engine, 4, kind), rollouts=1)
                said = refusal(engine.step)
                results[f"{stage} {kind} {which}"] = [engine.last_step.step, from_all(said)]
    return results


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_that_freeze_different_parameters_are_refused_before_the_step(two_ranks, stage, kind):
    found = two_ranks.of(frozen_apart)
    steps, said = found[f"{stage} {kind} apart"]
    assert steps == 1
    for one in said:
        assert one.startswith("RankDesyncError"), one
        assert "Freeze the same on every rank" in one
    assert found[f"{stage} {kind} alike"] == [2, ["nothing was raised"] * 2]


@on_two_ranks
def one_autocast(folder):
    """The losses of steps on one micro-batch, with autocast around each forward, and around the loop."""
    results = {}
    for stage in (0, 1, 2, 3):
        for around in ("each", "all"):
            engine = build(config(stage, passes=2))
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5)).to(engine.device)
            autocast, losses = functools.partial(torch.autocast, engine.device.type, torch.bfloat16), []
            with autocast() if around == "all" else nullcontext():
                for _ in range(4):
                    with autocast() if around == "each" else nullcontext():
                        loss = engine(x).float().pow(2).mean()
                    engine.backward(loss, rollouts=1)
                    engine.step()
                    losses.append(engine.last_step.loss)
            results[f"{stage} {around}"] = losses
    return results


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_autocast_around_the_loop_sees_the_weights_of_every_step(two_ranks, stage):
    found = two_ranks.of(one_autocast)
    assert found[f"{stage} all"] == found[f"{stage} each"]
    assert len(set(found[f"{stage} each"])) == 4


@on_two_ranks
def changed_in_place(folder):
    """What is said of a change in place without a step, and of a forward past the engine that a step lies behind."""
    results = {}
    for stage in (0, 1, 2, 3):
        engine = build(config(stage, passes=4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(_spoilt(engine), rollouts=1)
        results[f"{stage} without a step"] = "torch's own"
        again = build(config(stage, passes=4))
        x = torch.ones(3, 4, device=again.device)
        late = again.module(x).pow(2).mean()
        for seed in (4, 5):
            one_pass(again, seed, rollouts=1)
        results[f"{stage} past the engine"] = refusal(functools.partial(again.backward, late, rollouts=1))
    return results


def _spoilt(engine):
    """A loss whose backward needs what an operation in place has changed."""
    middle = engine(torch.ones(3, 4, device=engine.device)).exp()
    loss = middle.sum()
    middle.add_(1)
    return loss


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_changes_in_place_are_told_by_torchs_words(two_ranks, stage):
    found = two_ranks.of(changed_in_place)
    assert found[f"{stage} without a step"] == "torch's own"
    said = found[f"{stage} past the engine"]
    assert said.startswith("WindowError: torch says in backward(): one of the variables needed for gradient")
    assert "If a step() lies between this backward and its forward" in said


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
            for seed in (1, 2):
                one_pass(engine, seed, rollouts=1)
            results[f"{name} {stage} rates"] = engine.last_step.lr[0]
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
    # Of the second step: half of 0.1; or 0.1 on a line from a third of it in five steps to all of it.
    assert found[f"{name} {stage} rates"] == pytest.approx(0.05 if name == "plain" else 0.1 * (1 / 3 + 2 / 15))


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
            listed = ", ".join(map(str, sorted(stages)))
            assert said.startswith(
                f"RankDesyncError: zero_optimization.stage is {stages[rank // 2]} on this rank's group, and groups of "
                f"ranks that build engines at once have stages {listed}: DeepSpeed waits"
            ), said
