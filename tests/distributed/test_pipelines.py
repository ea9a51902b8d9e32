"""A PipelineModule of two stages on two data-parallel ranks takes the steps of an fp64 reference, window by window."""

import dataclasses
import functools
import gc
import itertools
import json
import math
from contextlib import chdir
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.distributed.distributed_c10d import _world

import ds_parity
from ds_parity.engine.ranks import hostgroups
from ds_parity.parity.data.rollouts import VOCAB, load_rollouts, shorten
from tests.distributed.engines import from_all, listen, refusal
from tests.distributed.sets import on_four_ranks
from tests.pages import blocks

pytestmark = pytest.mark.ranks
# By window and column, the rollouts of each micro-batch: columns have other numbers of micro-batches, and one has none.
WINDOWS = [[[1, 3, 2], [2, 2]], [[2], [1, 1, 3, 2]], [[2, 1], [3, 3]], [[1, 1, 1, 1, 2], [4]], [[1, 2], []], [[], [2]]]
HALVES = {"bf16": {"enabled": True}}
KINDS = {
    "fp32": {},
    "bf16": HALVES,
    "activation-checkpointing": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
}
SHARDED = {
    "fp32-sums": {**HALVES, "data_types": {"grad_accum_dtype": "fp32"}},
    "overlap_comm": {"zero_optimization": {"stage": 1, "overlap_comm": True}},
    "offloaded": {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
}
CASES = [(stage, kind) for stage in (0, 1) for kind in KINDS] + [(1, kind) for kind in SHARDED]
# fp32 beside fp64, and bf16 rounds a weight of about 1 by 0.004.
BOUNDS = {"bf16": 0.03, "fp32-sums": 0.03}


def layers():
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]


def squares(outputs, labels):
    return (outputs.float().squeeze(-1) - labels.float()).pow(2).mean()


def sample(column, window, index, size):
    draw = torch.Generator().manual_seed(1000 * column + 100 * window + index)
    return torch.randn(size, 6, generator=draw), torch.randn(size, generator=draw)


def config(stage, section=None, **more):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "ds_parity": {"boundary": "caller", "exchange_timeout": 30.0, **(section or {})},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **more,
    }


def module(layers_of=layers):
    return deepspeed.PipelineModule(layers_of(), num_stages=2, loss_fn=squares, partition_method="uniform")


def build(extended, initialize=ds_parity.initialize, layers_of=layers):
    pipeline = module(layers_of)
    return initialize(model=pipeline, model_parameters=list(pipeline.parameters()), config=extended)[0]


def micro_batches(engine, window, sizes):
    device, column = get_accelerator().current_device_name(), engine.grid.get_data_parallel_id()
    kind = next(engine.module.parameters()).dtype
    for index, size in enumerate(sizes[column]):
        x, y = (one.to(device) for one in sample(column, window, index, size))
        yield ds_parity.MicroBatch({"inputs": x.to(kind), "labels": y}, rollouts=size, tokens=2 * size)


def stepped(engine, record, model):
    """Take the reference's step at the rate that the engine has used; returns how far a weight is from it."""
    model.optimizer.param_groups[0]["lr"] = record.lr[0]
    model.optimizer.step()
    model.optimizer.zero_grad()
    right = model.module.state_dict()
    return max(float((one.double().cpu() - right[name]).abs().max()) for name, one in engine.module.named_parameters())


class Alone:
    """The model in fp64."""

    def __init__(self):
        self.module = nn.Sequential(*layers()).double()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    def gradient(self, number, columns):
        """Leave the clipped gradient of a window; returns its loss and its norm."""
        total, summed = sum(map(sum, columns)), 0.0
        for column, sizes in enumerate(columns):
            for index, size in enumerate(sizes):
                x, y = (one.double() for one in sample(column, number, index, size))
                loss = (self.module(x).squeeze(-1) - y).pow(2).mean() * size / total
                loss.backward()
                summed += float(loss.detach())
        return summed, float(nn.utils.clip_grad_norm_(self.module.parameters(), 0.5))


def alone_in_the_process(task):
    """Let no later task's engine find the grid of this one's, and leave no group behind: DeepSpeed keeps both.

    Each pipeline makes some 10 groups, and a thread of each wakes up 100 times a second (gloo's tcp/loop.cc): a
    thousand of them keep two cores busy.
    """

    @functools.wraps(task)
    def run(*args, **kwargs):
        before = set(_world.pg_map)
        try:
            return task(*args, **kwargs)
        finally:
            deepspeed.utils.groups.mpu = p2p._grid = None
            # On ZeRO 1 its hooks hold an engine, on the last stage those of its outputs, in bare DeepSpeed, too, and it
            # holds its groups, whose threads end with the last that does.
            for engine in [one for one in gc.get_objects() if isinstance(one, PipelineEngine)]:
                engine.destroy()
                vars(engine).clear()
            gc.collect()
            # Of DeepSpeed's own it holds that of all ranks for every later engine.
            kept = before | set(hostgroups._GROUPS.values()) | {deepspeed.utils.groups._WORLD_GROUP}
            for group in [one for one in _world.pg_map if one not in kept]:
                dist.destroy_process_group(group)
            # It keeps groups of experts by their names.
            for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
                held = getattr(deepspeed.utils.groups, name)
                for one in [one for one, group in held.items() if group not in _world.pg_map]:
                    del held[one]

    return run


@on_four_ranks
@alone_in_the_process
def ragged_windows(folder):
    """By case and rank: the greatest distance of a weight, of a loss and of a norm, and what was counted."""
    found = {}
    for stage, kind in CASES:
        engine, alone = build(config(stage, {"loss_weight": "token"}, **(KINDS | SHARDED)[kind])), Alone()
        off, records = [0.0, 0.0, 0.0], []
        for number, columns in enumerate(WINDOWS):
            record = engine.train_window(micro_batches(engine, number, columns))
            loss, norm = alone.gradient(number, columns)
            off[0] = max(off[0], stepped(engine, record, alone))
            off[1] = max(off[1], abs(record.loss - loss))
            off[2] = max(off[2], abs(record.grad_norm - norm))
            records.append([record.rollouts, record.total, record.passes, record.idle_passes, record.skipped])
        counted = [engine.global_steps, engine.global_samples, records]
        found[f"{stage}-{kind}"] = from_all([off, counted])
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "kind"), CASES)
def test_ragged_windows_step_as_the_reference_does(four_ranks, stage, kind):
    records = [
        [sum(map(sum, columns)), 2 * sum(map(sum, columns)), longest, 2 * longest - sum(map(len, columns)), False]
        for columns in WINDOWS
        for longest in [max(map(len, columns))]
    ]
    for off, counted in four_ranks.of(ragged_windows)[f"{stage}-{kind}"]:
        assert max(off) <= BOUNDS.get(kind, 1e-6), off
        assert counted == [len(WINDOWS), sum(record[0] for record in records), records]


@on_four_ranks
@alone_in_the_process
def uniform_windows(folder):
    """By stage: whether all weights are those of DeepSpeed's own train_batch, bit for bit."""
    found = {}
    for stage in (0, 1):
        # On ZeRO 0 in fp32 DeepSpeed clips by the norm of the first stage.
        clip = {"gradient_clipping": 0.5 * stage}
        plain = config(stage, gradient_accumulation_steps=3, **clip)
        del plain["ds_parity"]
        bare, ours = build(plain, deepspeed.initialize), build(config(stage, **clip))
        losses = []
        for number in range(4):
            sizes = [[2, 2, 2], [2, 2, 2]]
            own = list(micro_batches(ours, number, sizes))
            right = bare.train_batch(iter([(one.inputs["inputs"], one.inputs["labels"]) for one in own]))
            losses.append([ours.train_window(own).loss, float(right)])
        pairs = zip(ours.module.parameters(), bare.module.parameters(), strict=True)
        found[stage] = from_all([all(bool((one == other).all()) for one, other in pairs), losses])
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_uniform_windows_are_deepspeeds_own_bit_for_bit(four_ranks, stage):
    for equal, losses in four_ranks.of(uniform_windows)[str(stage)]:
        assert equal
        assert all(ours == right for ours, right in losses)


@on_four_ranks
@alone_in_the_process
def infinite_on_the_last_stage(folder):
    """By stage of ZeRO and clipping: whether all stages keep their weights, and whether the next step moves them."""
    found = {}
    for stage, clip in itertools.product((0, 1), (0.0, 0.5)):
        extended = config(stage, gradient_clipping=clip)
        del extended["scheduler"]  # its warm-up begins at 0
        engine = build(extended)
        last = list(engine.module.parameters())[-1]

        def window(infinite, engine=engine, last=last):
            hook = last.register_hook(lambda gradient: gradient * (torch.inf if infinite else 1.0))
            before = [one.detach().clone() for one in engine.module.parameters()]
            skipped = engine.train_window(list(micro_batches(engine, 0, [[2, 1], [3]]))).skipped
            hook.remove()
            return skipped, all(map(torch.equal, before, engine.module.parameters()))

        infinite = engine.grid.get_stage_id() == 1
        found[f"{stage}, {clip}"] = from_all([*window(infinite), *window(infinite=False)])
        engine.destroy()
    return found


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("stage", [0, 1])
def test_all_stages_skip_a_step_of_which_one_has_an_infinite_gradient(four_ranks, stage, clip):
    for skipped, kept, skipped_then, kept_then in four_ranks.of(infinite_on_the_last_stage)[f"{stage}, {clip}"]:
        assert (skipped, kept) == (True, True)
        assert (skipped_then, kept_then) == (False, False)


def of_nothing(engine, size=2, value=math.nan):
    """A micro-batch that weighs nothing, and whose loss is not finite."""
    device, kind = get_accelerator().current_device_name(), next(engine.module.parameters()).dtype
    inputs = {"inputs": torch.full((size, 6), value, dtype=kind, device=device)}
    return ds_parity.MicroBatch({**inputs, "labels": torch.zeros(size, device=device)}, rollouts=0, tokens=0)


@on_four_ranks
@alone_in_the_process
def nothing_that_is_not_finite(folder):
    """By stage: how far weights are where one column has nothing but NaN; and a window that has nothing at all."""
    found = {}
    for stage in (0, 1):
        engine, alone = build(config(stage, {"loss_weight": "token"})), Alone()
        off = 0.0
        for number, columns in enumerate([[[2, 1], [3]], [[2, 2], []], [[1], [2, 2]]]):
            own = list(micro_batches(engine, number, columns))
            record = engine.train_window([of_nothing(engine), *own])
            alone.gradient(number, columns)
            off = max(off, stepped(engine, record, alone))
        before = [one.detach().clone() for one in engine.module.parameters()]
        empty = engine.train_window([of_nothing(engine)])
        kept = all(bool((one == other).all()) for one, other in zip(before, engine.module.parameters(), strict=True))
        text, end = listen()
        lost = engine.train_window([dataclasses.replace(of_nothing(engine), rollouts=1, tokens=1)])
        end()
        kept = kept and "window 4: its gradient is not finite" in text.getvalue()
        kept = kept and all(bool(one.isfinite().all()) for one in engine.module.parameters()) and lost.skipped
        found[stage] = from_all([off, empty.skipped, empty.loss, kept, record.loss])
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_what_weighs_nothing_does_not_enter_the_step_whatever_it_holds(four_ranks, stage):
    for off, skipped, loss, kept, last in four_ranks.of(nothing_that_is_not_finite)[str(stage)]:
        assert off <= 1e-6
        assert math.isfinite(last)
        assert (skipped, loss, kept) == (True, None, True)


RESUMED = [(1, "fp32"), (0, "bf16"), (1, "bf16"), (1, "fp32-sums")]


def config_of(stage, kind):
    return config(stage, **(KINDS | SHARDED)[kind])


@alone_in_the_process
def gone_on(folder, stage, kind):
    """Whether weights are the same, bit for bit, where an engine goes on from a checkpoint."""
    whole = build(config_of(stage, kind))
    for number, columns in enumerate(WINDOWS[:4]):
        whole.train_window(micro_batches(whole, number, columns))
        if number == 1:
            whole.save_checkpoint(folder, tag=f"{stage} {kind}")
    again = build(config_of(stage, kind))
    again.load_checkpoint(folder, tag=f"{stage} {kind}")
    for number, columns in enumerate(WINDOWS[2:4], start=2):
        again.train_window(micro_batches(again, number, columns))
    pairs = zip(whole.module.parameters(), again.module.parameters(), strict=True)
    equal = all(bool((one == other).all()) for one, other in pairs)
    return from_all([equal, again.global_steps, again.global_samples, whole.global_samples, again.last_step.step])


@on_four_ranks
def resumed(folder):
    return {f"{stage} {kind}": gone_on(folder, stage, kind) for stage, kind in RESUMED}


@pytest.mark.parametrize(("stage", "kind"), RESUMED)
def test_a_checkpoint_resumes_bit_for_bit(four_ranks, stage, kind):
    rollouts = sum(sum(map(sum, columns)) for columns in WINDOWS[:4])
    assert four_ranks.of(resumed)[f"{stage} {kind}"] == [[True, 4, rollouts, rollouts, 4]] * 4


@alone_in_the_process
def moved_by_a_step(folder, stage, kind):
    """How far weights are from those that were loaded alone, behind a step at a rate of 0."""
    extended = config_of(stage, kind) | {"scheduler": {"type": None}}
    saved = build(extended)
    saved.train_window(micro_batches(saved, 0, WINDOWS[0]))
    saved.save_checkpoint(folder, tag=f"{stage} {kind}")
    engine = build(extended | {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}})
    # The stages of a new engine begin alike, and bf16 has few digits.
    for p in engine.module.parameters():
        p.data.add_(1.0)
    engine.load_checkpoint(folder, tag=f"{stage} {kind}", load_optimizer_states=False)
    engine.train_window(micro_batches(engine, 1, WINDOWS[1]))
    pairs = zip(saved.module.parameters(), engine.module.parameters(), strict=True)
    return from_all(max(float((one - other).abs().max()) for one, other in pairs))


@on_four_ranks
def weights_alone(folder):
    return {f"{stage} {kind}": moved_by_a_step(folder, stage, kind) for stage, kind in RESUMED}


@pytest.mark.parametrize(("stage", "kind"), RESUMED)
def test_a_step_goes_on_from_weights_that_were_loaded_alone(four_ranks, stage, kind):
    assert four_ranks.of(weights_alone)[f"{stage} {kind}"] == [0.0] * 4


def planned(batches, column, plan):
    """Micro-batches as those of a plan for two columns."""
    return [dataclasses.replace(one, planned_for=2, plan_rank=column, plan_number=plan) for one in batches]


@on_four_ranks
@alone_in_the_process
def refused(folder):
    """By what is wrong: what each rank is answered."""
    engine, rank = build(config(1)), dist.get_rank()
    own, column = list(micro_batches(engine, 0, [[1, 2], [2]])), engine.grid.get_data_parallel_id()
    found = {
        "train_batch": refusal(lambda: engine.train_batch(iter([]))),
        "batch-size": refusal(lambda: engine.set_train_batch_size(4)),
        "no-first": refusal(lambda: engine.train_window(own if engine.grid.get_data_parallel_id() else [])),
        "keys": refusal(lambda: engine.train_window([ds_parity.MicroBatch({"input_ids": 1})])),
        "no-list": refusal(lambda: engine.train_window(ds_parity.MicroBatch({}))),
        "column": refusal(lambda: engine.train_window(own[:-1] if rank == 0 else own)),
        "raised": refusal(lambda: engine.train_window(["x"] if rank == 3 else own)),
        "plans": refusal(lambda: engine.train_window(planned(own, column, plan=1 + column))),
        "part": refusal(lambda: engine.train_window(planned(own, 0, plan=1))),
    }
    found["then"] = refusal(lambda: engine.train_window(planned(own, column, plan=1)))
    for name, extended in {
        "boundary": config(1, {"boundary": "rollouts"}, gradient_accumulation_passes=8),
        "stage": config(2),
        "trace": config(1, {"trace": f"{folder}/trace.jsonl"}),
        "fp16": config(1, fp16={"enabled": True}),
        "timers": config(1, wall_clock_breakdown=True),
        "writer": config(
            0, bf16={"enabled": True}, checkpoint={"writer": {"type": "python", "data_parallel": "replica"}}
        ),
    }.items():
        found[name] = refusal(lambda extended=extended: build(extended))
    found["untrained"] = refusal(lambda: build(config(1), layers_of=last_frozen))
    whole = nn.Sequential(*layers())
    found["whole model"] = refusal(
        lambda: ds_parity.initialize(model=whole, model_parameters=whole.parameters(), config=config(1))
    )
    return from_all(found)


def whole_model(alone):
    """How far an engine of the whole model is from the reference behind a window with a batch of each rank."""
    model = nn.Sequential(*layers())
    engine, *_ = ds_parity.initialize(
        model=model, model_parameters=model.parameters(), config=config(1, {"loss_weight": "token"})
    )
    columns = [[1 + rank, 2] for rank in range(dist.get_world_size())]
    for index, size in enumerate(columns[dist.get_rank()]):
        x, y = (one.to(engine.device) for one in sample(dist.get_rank(), 0, index, size))
        engine.backward(squares(engine(x), y), rollouts=size, tokens=2 * size)
    engine.step()
    alone.gradient(0, columns)
    return stepped(engine, engine.last_step, alone)


@on_four_ranks
@alone_in_the_process
def whole_models(folder):
    """A pipeline, engines of the whole model where its groups were forgotten, and a pipeline behind them."""
    found = []
    for _ in range(2):
        engine, alone = build(config(1, {"loss_weight": "token"})), Alone()
        record = engine.train_window(micro_batches(engine, 0, WINDOWS[0]))
        alone.gradient(0, WINDOWS[0])
        found.append(stepped(engine, record, alone))
        deepspeed.utils.groups.mpu = None
        found.append(whole_model(Alone()))
    return from_all(found)


def test_engines_of_a_whole_model_train_where_the_groups_of_a_pipeline_are_forgotten(four_ranks):
    for found in four_ranks.of(whole_models):
        assert max(found) <= 1e-6


class Inner(nn.Module):
    """A weight that is shared under the name of a property, as Megatron's embedding, and two that are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(6, 6, bias=False)
        self.first, self.last = (nn.Parameter(torch.full((6,), 0.3)) for _ in range(2))

    @property
    def tied(self):
        return self.inner.weight

    def forward(self, x):
        return x @ self.inner.weight + self.first


def half_tied(used, *, alone=False):
    """The first and the last layer share a weight, and the last one uses a bias beside it, or does not.

    `alone`: the last stage has no weight beside what it shares.
    """

    def last(module, x):
        return (x @ module.inner.weight.t() + (module.last if used else 0.0)).sum(-1, keepdim=True)

    torch.manual_seed(0)
    tied = functools.partial(deepspeed.pipe.TiedLayerSpec, "shared", Inner, tied_weight_attr="tied")
    between = [nn.Tanh(), nn.Linear(6, 6)]
    return [tied(), *(reversed(between) if alone else between), tied(forward_fn=last)]


@on_four_ranks
@alone_in_the_process
def half_tied_layers(folder):
    """By stage and whether the bias is used: the norm of a window, the right one, and what saving answers."""
    found = {}
    for stage, used in itertools.product((0, 1), (False, True)):
        engine = build(config(stage), layers_of=lambda used=used: half_tied(used))
        record = engine.train_window(micro_batches(engine, 0, [[2, 1], [3]]))
        said = refusal(lambda engine=engine: engine.save_checkpoint(folder))
        found[f"{stage} {used}"] = from_all([record.grad_norm, norm_of_half_tied(used), said])
        engine.destroy()
    return found


def norm_of_half_tied(used, *, alone=False):
    """The norm of the first window's gradient, in fp64."""
    torch.manual_seed(0)
    middle, inner = nn.Linear(6, 6).double(), Inner().double()
    total = 0.0
    for column, sizes in enumerate([[2, 1], [3]]):
        for index, size in enumerate(sizes):
            x, y = (one.double() for one in sample(column, 0, index, size))
            between = torch.tanh(middle(inner(x))) if alone else middle(torch.tanh(inner(x)))
            out = between @ inner.inner.weight.t() + (inner.last if used else 0.0)
            total = total + (out.sum(-1) - y).pow(2).mean() * size / 6
    total.backward()
    squares = [one.grad.pow(2).sum() for one in [*middle.parameters(), *inner.parameters()] if one.grad is not None]
    return float(sum(squares)) ** 0.5


class Shared(nn.Module):
    """A weight, and no forward of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6) / 6)


def by_functions(*without):
    """The first and the last layer share a weight, and use it by a function; but for the places `without` one."""

    class Plain(Shared):
        def forward(self, x):
            return x @ self.weight

    made = Plain if without else Shared
    tied = functools.partial(deepspeed.pipe.TiedLayerSpec, "shared", made, tied_weight_attr="weight")
    uses = [{} if at in without else {"forward_fn": lambda module, x: x @ module.weight} for at in range(2)]
    torch.manual_seed(0)
    return [tied(**uses[0]), nn.Linear(6, 6), nn.Linear(6, 6), tied(**uses[1]), nn.Linear(6, 1)]


@on_four_ranks
@alone_in_the_process
def tied_by_functions(folder):
    """By which of two stages use a tied layer without a function: what saving answers, and how far a load is off."""
    found = {}
    for without in ((), (0,), (1,), (0, 1)):
        path = f"{folder}/{without}"
        engine = build(config(0), layers_of=lambda without=without: by_functions(*without))
        engine.train_window(micro_batches(engine, 0, [[2, 1], [3]]))
        said = refusal(lambda engine=engine, path=path: engine.save_checkpoint(path))
        apart = None
        if said == "nothing was raised":
            again = build(config(0), layers_of=lambda without=without: by_functions(*without))
            again.load_checkpoint(path)
            pairs = zip(engine.module.parameters(), again.module.parameters(), strict=True)
            apart = max(float((one - other).abs().max()) for one, other in pairs)
        found[str(without)] = from_all([said, apart])
    return found


FROZEN_TIES = ("fp32", "fp32-sums", "offloaded", "offloaded fp32-sums")


@alone_in_the_process
def frozen_tie(kind):
    """Whether a shared weight stays, and others move, where it was frozen before the engine is built."""
    model = module(lambda: by_functions(0, 1))
    for name, one in model.named_parameters():
        one.requires_grad_("tied" not in name)
    trained = [one for one in model.parameters() if one.requires_grad]
    engine = ds_parity.initialize(model=model, model_parameters=trained, config=config(1, **TIED[kind]))[0]
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for window in range(6):  # the first rates of the warm-up move no weight in bf16
        engine.train_window(micro_batches(engine, window, [[2, 1], [3]]))
    moved = {name: bool((one != before[name]).any()) for name, one in model.named_parameters()}
    return from_all([moved[name] for name in moved if "tied" in name] + [any(moved.values())])


@on_four_ranks
def frozen_ties(folder):
    return {kind: frozen_tie(kind) for kind in FROZEN_TIES}


@pytest.mark.parametrize("kind", FROZEN_TIES)
def test_a_frozen_tied_layer_stays_and_others_train(four_ranks, kind):
    assert four_ranks.of(frozen_ties)[kind] == [[False, True]] * 4


@on_four_ranks
@alone_in_the_process
def frozen_on_one_stage(folder):
    """What the window ends in before which the first stage alone has frozen a shared weight, and the one behind it."""
    engine = build(config(1), layers_of=lambda: by_functions(0, 1))
    engine.train_window(micro_batches(engine, 0, [[2, 1], [3]]))
    (tied,) = (one for name, one in engine.module.named_parameters() if "tied" in name)
    tied.requires_grad_(engine.stage_id > 0)
    said = refusal(lambda: engine.train_window(micro_batches(engine, 1, [[2, 1], [3]])))
    tied.requires_grad_(True)
    return from_all([said, engine.train_window(micro_batches(engine, 1, [[2, 1], [3]])).step])


@on_four_ranks
@alone_in_the_process
def given_on_one_stage(folder):
    """What the first window ends in where one stage's optimizer alone has a shared weight."""
    model = module(lambda: by_functions(0, 1))
    given = [one for name, one in model.named_parameters() if model.stage_id == 0 or "tied" not in name]
    engine = ds_parity.initialize(model=model, model_parameters=given, config=config(1))[0]
    return from_all(refusal(lambda: engine.train_window(micro_batches(engine, 0, [[2, 1], [3]]))))


def test_a_shared_weight_that_one_stage_alone_has_frozen_is_refused_on_every_rank(four_ranks):
    for said, step in four_ranks.of(frozen_on_one_stage):
        assert said.startswith("RankDesyncError")
        assert "has tied_modules.shared.weight trained, and stage 0 has it frozen" in said
        assert step == 2


def test_a_shared_weight_that_one_stage_alone_has_handed_over_is_refused_on_every_rank(four_ranks):
    for said in four_ranks.of(given_on_one_stage):
        assert said.startswith("RankDesyncError")
        assert "has tied_modules.shared.weight frozen, or not handed over, and stage 0 has it trained" in said


@pytest.mark.parametrize(("without", "saved"), [((), False), ((1,), False), ((0,), True), ((0, 1), True)])
def test_a_shared_weight_of_which_the_first_stage_saves_no_file_is_refused(four_ranks, without, saved):
    for said, apart in four_ranks.of(tied_by_functions)[str(without)]:
        if saved:
            assert (said, apart) == ("nothing was raised", 0.0)
        else:
            assert said.startswith(("CheckpointError", "RankDesyncError"))
            assert "shared.weight" in said


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("used", [False, True])
def test_what_a_tied_layer_does_not_share_is_in_the_norm(four_ranks, stage, used):
    for norm, right, said in four_ranks.of(half_tied_layers)[f"{stage} {used}"]:
        assert norm == pytest.approx(right, rel=1e-5)
        assert said.startswith(("CheckpointError", "RankDesyncError") if used else "nothing was raised")
        assert not used or "shared.last" in said


def last_frozen():
    """The second stage has nothing to train."""
    first, *others = layers()
    return [first, *(one.requires_grad_(False) for one in others)]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("train_batch", "WindowError: train_batch() of a pipeline"),
        ("batch-size", "WindowError: set_train_batch_size(4)"),
        ("no-first", "WindowError: a column of the pipeline has no micro-batch in its first window"),
        ("keys", "WindowError: micro-batch 0 of train_window() has inputs ['input_ids']"),
        ("no-list", "WindowError: train_window() got a MicroBatch, which can't be iterated"),
        ("column", "RankDesyncError: rank"),
        (
            "plans",
            "RankDesyncError: ranks take their micro-batches from different plans (rank 0 begins plan 00000001 where",
        ),
        ("then", "nothing was raised"),
        ("boundary", "ConfigError: model is a PipelineModule, with ds_parity.boundary 'rollouts'"),
        ("stage", "ConfigError: model is a PipelineModule, with zero_optimization.stage 2"),
        ("trace", "ConfigError: model is a PipelineModule, with ds_parity.trace"),
        ("fp16", "ConfigError: model is a PipelineModule, with fp16"),
        ("timers", "ConfigError: model is a PipelineModule, with wall_clock_breakdown"),
        ("writer", "ConfigError: model is a PipelineModule, with bf16 and checkpoint.writer"),
    ],
)
def test_what_a_pipeline_refuses_it_refuses_on_every_rank(four_ranks, what, says):
    for answers in four_ranks.of(refused):
        assert answers[what].startswith(says), answers[what]


def test_a_stage_that_trains_nothing_is_refused_on_every_rank(four_ranks):
    for answers in four_ranks.of(refused):
        assert answers["untrained"].startswith(("ConfigError: stage 1 of the pipeline trains no", "RankDesyncError: "))
    assert any("ConfigError: stage 1" in answers["untrained"] for answers in four_ranks.of(refused))


def test_an_engine_of_a_whole_model_is_refused_behind_a_pipeline(four_ranks):
    rule = "ConfigError: model= is no deepspeed.PipelineModule, but an earlier engine of this process was a pipeline"
    for answers in four_ranks.of(refused):
        assert answers["whole model"].startswith(f"{rule} of 2 stages"), answers["whole model"]


def test_the_part_of_another_column_is_refused(four_ranks):
    said = [answers["part"] for answers in four_ranks.of(refused)]
    assert (
        sum(one.startswith("ConfigError: micro-batch 0 of train_window() is that of data-parallel") for one in said)
        == 2
    )
    assert all("engine.grid.get_data_parallel_id()" in one or one.startswith("RankDesyncError: ") for one in said)


def test_what_one_rank_raises_the_others_are_told(four_ranks):
    answers = [one["raised"] for one in four_ranks.of(refused)]
    assert answers[3].startswith("WindowError: ")
    assert all(one.startswith("RankDesyncError: ") and "WindowError" in one for one in answers[:3]), answers


class Embedded(nn.Embedding):
    """The first layer of the page's model."""

    def __init__(self, vocab):
        super().__init__(vocab, 8)


@on_four_ranks
@alone_in_the_process
def page(folder):
    """What the engine of docs/pipelines.md has counted."""
    torch.manual_seed(0)
    extended = json.loads(blocks("pipelines", "json")[0])
    extended["optimizer"]["params"]["torch_adam"] = True  # else DeepSpeed compiles its own, for minutes
    (code,) = blocks("pipelines", "python")
    names = {"dataclasses": dataclasses, "itertools": itertools, "deepspeed": deepspeed, "ds_parity": ds_parity}
    names |= {
        "rollouts": shorten(load_rollouts()[:128], 48),
        "layers": [Embedded(VOCAB), nn.Tanh(), nn.Linear(8, VOCAB)],
    }
    place = Path(folder) / f"rank{dist.get_rank()}"
    place.mkdir(parents=True)
    with chdir(place):
        Path("ds_config.json").write_text(json.dumps(extended))
        exec(compile(code, "pipelines", "exec"), names)
    record = names["record"]
    return from_all([names["engine"].global_steps, record.step, record.rollouts, record.tokens == record.total])


def test_the_page_trains_its_windows(four_ranks):
    assert four_ranks.of(page) == [[2, 2, 64, True]] * 4


TIED = {name: (KINDS | SHARDED)[name] for name in ("fp32", "bf16", "fp32-sums", "overlap_comm", "offloaded")}
TIED["offloaded fp32-sums"] = {**SHARDED["fp32-sums"], **SHARDED["offloaded"]}


@on_four_ranks
@alone_in_the_process
def tied_stages(folder):
    """By kind: the norm of a window with a tied layer, the right one, and the tied weight behind it."""
    found = {}
    for kind, more in TIED.items():
        engine = build(config(1, **more), layers_of=lambda: half_tied(False))
        record = engine.train_window(micro_batches(engine, 0, [[2, 1], [3]]))
        weight = engine.module.tied_modules["shared"].tied.float().tolist()
        found[kind] = from_all([record.grad_norm, norm_of_half_tied(False), weight])
        engine.destroy()
    return found


@pytest.mark.parametrize("kind", TIED)
def test_stages_of_a_tied_layer_step_it_by_the_sum_of_their_gradients(four_ranks, kind):
    results = four_ranks.of(tied_stages)[kind]
    for norm, right, weight in results:
        # bf16 rounds what the layers hand on by 0.4 %.
        assert norm == pytest.approx(right, rel=1e-5 if kind in ("fp32", "overlap_comm", "offloaded") else 0.02)
        assert weight == results[0][2]


@on_four_ranks
@alone_in_the_process
def tied_alone(folder):
    """By stage and kind, where a stage has nothing but what it shares: two norms, the first one right, the weight."""
    found = {}
    for stage, kind in TIED_ALONE:
        engine = build(config(stage, **(KINDS | SHARDED)[kind]), layers_of=lambda: half_tied(False, alone=True))
        norms = [engine.train_window(micro_batches(engine, window, [[2, 1], [3]])).grad_norm for window in (0, 1)]
        weight = engine.module.tied_modules["shared"].tied.float().tolist()
        found[f"{stage} {kind}"] = from_all([norms, norm_of_half_tied(False, alone=True), weight])
        engine.destroy()
    return found


TIED_ALONE = [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16"), (1, "fp32-sums")]


@pytest.mark.parametrize(("stage", "kind"), TIED_ALONE)
def test_a_stage_of_tied_weights_alone_steps_by_the_norm_of_all(four_ranks, stage, kind):
    results = four_ranks.of(tied_alone)[f"{stage} {kind}"]
    for norms, right, weight in results:
        # bf16 rounds what the layers hand on by 0.4 %.
        assert norms[0] == pytest.approx(right, rel=1e-5 if kind == "fp32" else 0.02)
        assert norms == results[0][0]
        assert weight == results[0][2]


@on_four_ranks
@alone_in_the_process
def frozen_handed_over(folder):
    """By stage: what a pipeline is answered all of whose parameters are handed over, of which one layer is frozen."""

    def some_frozen():
        made = [nn.Linear(6, 6) for _ in range(4)]
        made[0].requires_grad_(False)
        return [*made, nn.Linear(6, 1)]

    found = {}
    for stage in (0, 1):
        engine = build(config(stage), layers_of=some_frozen)
        found[stage] = from_all(refusal(lambda e=engine: e.train_window(micro_batches(e, 0, [[2, 1], [3]]))))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_frozen_parameters_may_be_handed_over_to_a_pipeline(four_ranks, stage):
    assert four_ranks.of(frozen_handed_over)[str(stage)] == ["nothing was raised"] * 4
