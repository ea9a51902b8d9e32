"""What a loop does beside the engine: it reads gradients, steps optimizers, adds parameters, sets a default device."""

import gc
import warnings
from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from torch.optim.lr_scheduler import LambdaLR

import ds_parity
from ds_parity.engine.internals.installed import installed
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import from_all, perceptron
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_changing_parameters import Pair, ones
from tests.distributed.test_loop_shapes import engine_of, extended, loss_of, sample, weights
from tests.older_refusals import is_older

pytestmark = pytest.mark.ranks


def answer(call):
    """The first words of the error that `call` ends in, whoever raises it."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# Gradients that are read between backward() and step().

# Rollouts of both ranks by pass: windows of 11 and 10 rollouts whose losses are divided by 10 and by 9.
READ = (((3, 2), (3, 3)), ((2, 2), (3, 3)))


def mean_of(values, window, number):
    """The gradient of a window over all ranks, in fp64, at these weights."""
    model = perceptron().double()
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = torch.tensor(value, dtype=torch.float64).view(parameter.shape)
    total = sum(map(sum, window))
    for at, counts in enumerate(window):
        for rank, rollouts in enumerate(counts):
            loss = model(sample(100 * number + 10 * at + rank).cpu().double()).pow(2).mean()
            (loss * rollouts / total).backward()
    return [p.grad.flatten().tolist() for p in model.parameters()]


def shown(parameter, stage):
    return parameter.grad if stage == 0 else safe_get_full_grad(parameter)


@on_two_ranks
def gradients_that_are_read(folder):
    """By stage: of each window its correction, the gradient as it is shown there, and as it is."""
    results = {}
    for stage in STAGES:
        engine, _ = engine_of(stage)
        windows = []
        for number, window in enumerate(READ):
            values = weights(engine)
            for at, counts in enumerate(window):
                loss = loss_of(engine, engine, 100 * number + 10 * at + dist.get_rank())
                engine.backward(loss, rollouts=counts[dist.get_rank()])
                if engine.is_gradient_accumulation_boundary():
                    read = [shown(p, stage).double().cpu().flatten().tolist() for p in engine.module.parameters()]
                    windows.append([engine.window.correction, read, mean_of(values, window, number)])
                engine.step()
        results[f"{stage}"] = windows
        engine.destroy()
    return results


def test_a_gradient_that_is_read_times_the_correction_is_that_of_the_step(two_ranks, stage):
    windows = two_ranks.of(gradients_that_are_read)[stage]
    assert [one for one, *_ in windows] == [10 / 11, 9 / 10]
    for correction, read, right in windows:
        for one, other in zip(read, right, strict=True):
            assert [correction * number for number in one] == pytest.approx(other, abs=1e-6)


@on_two_ranks
def gradients_that_are_set(folder):
    """By stage: how far each weight moves by a gradient of ones that is divided by the correction."""
    results = {}
    for stage in STAGES[1:]:
        engine, _ = engine_of(stage, model=Pair())  # DeepSpeed sets no gradient of fewer elements than ranks
        for counts in READ[0]:
            engine.backward(engine(ones(engine), 0, 1), rollouts=counts[dist.get_rank()])
            if engine.is_gradient_accumulation_boundary():
                for parameter in engine.module.parameters():
                    gradient = safe_get_full_grad(parameter)
                    safe_set_full_grad(parameter, torch.ones_like(gradient) / engine.window.correction)
            engine.step()
        results[f"{stage}"] = [-number for values in weights(engine) for number in values]
        engine.destroy()
    return results


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_gradient_that_is_set_is_divided_by_the_correction(two_ranks, stage):
    moved = two_ranks.of(gradients_that_are_set)[stage]
    assert moved == pytest.approx([0.5] * len(moved), abs=1e-6)


# Weights and states that are written between windows.

WRITTEN = [*product((1, 2, 3), ("fp32", "bf16")), (3, "offload")]


@on_two_ranks
def weights_that_are_written(folder):
    """By cell: what is read of weights and states behind writing them, and the weights behind another window."""
    results = {}
    for stage, kind in WRITTEN:
        torch.manual_seed(0)
        engine, _ = engine_of(stage, kind, model=torch.nn.Sequential(torch.nn.Linear(4, 13), torch.nn.Linear(13, 1)))
        train(engine)
        read = []
        for number, parameter in enumerate(engine.module.parameters()):
            full = safe_get_full_fp32_param(parameter)
            value = torch.arange(full.numel(), dtype=torch.float32, device=full.device).view(full.shape) + number
            safe_set_full_fp32_param(parameter, value)
            read.append(bool(torch.equal(safe_get_full_fp32_param(parameter), value)))
            if stage == 3:
                other = torch.ones(99, device=full.device)
                wrong = answer(lambda p=parameter, other=other: safe_set_full_fp32_param(p, other))
                read.append("do not match" in wrong)
        results[f"{stage} {kind}"] = read
        engine.destroy()
    return from_all(results)


@pytest.mark.parametrize("cell", [f"{stage} {kind}" for stage, kind in WRITTEN])
def test_a_weight_of_any_size_can_be_written_on_every_rank(two_ranks, cell):
    """Bare DeepSpeed's ZeRO 3 raises on the last rank alone where ranks do not divide the size."""
    for found in two_ranks.of(weights_that_are_written):
        assert found[cell]
        assert all(found[cell])


# Optimizers that are stepped by their user.

STEPPED = [*product((0, 1), ("fp32", "bf16")), (2, "fp32"), (3, "fp32"), (1, "offload"), (3, "offload")]
PASSES = ((2, 2), (3, 3), (2, 3), (3, 2))  # two windows of 10 rollouts


def train(engine, beside=lambda: None, after=lambda: None):
    """Two windows; `beside` runs before each step(), `after` behind it."""
    for at, counts in enumerate(PASSES):
        engine.backward(loss_of(engine, engine, 2 * at + dist.get_rank()), rollouts=counts[dist.get_rank()])
        beside()
        engine.step()
        after()
    return weights(engine)


@on_two_ranks
def optimizers_stepped_by_hand(folder):
    """By cell: whether weights are as without it, and what the calls are answered with."""
    results = {}
    for stage, kind in STEPPED:
        engine, _ = engine_of(stage, kind)
        right = train(engine)
        engine.destroy()
        cell = {}
        for which in ("returned", "client"):
            engine, client = engine_of(stage, kind)
            stepped, said = engine.optimizer if which == "returned" else client, []
            made = train(engine, lambda o=stepped, said=said: said.append(answer(o.step)))
            cell[which] = [made == right, said]
            if engine.optimizer is not stepped or which == "returned":
                cell[f"{which} between"] = answer(stepped.step)
            engine.destroy()
        results[f"{stage} {kind}"] = cell
    return results


@pytest.mark.parametrize("which", ["returned", "client"])
@pytest.mark.parametrize(("stage", "kind"), STEPPED)
def test_an_optimizer_is_stepped_by_the_engine_alone(two_ranks, stage, kind, which):
    equal, said = two_ranks.of(optimizers_stepped_by_hand)[f"{stage} {kind}"][which]
    assert len(said) == len(PASSES)
    assert all(one.startswith("WindowError: step() of the optimizer") for one in said), said
    assert all("engine.step()" in one for one in said)
    assert equal


@pytest.mark.parametrize(("stage", "kind"), STEPPED)
def test_an_optimizer_without_a_gradient_is_not_stepped_by_hand_where_it_would_do_something(two_ranks, stage, kind):
    """torch's own does nothing between windows, where it has no gradients; DeepSpeed's have old ones, or none."""
    cell = two_ranks.of(optimizers_stepped_by_hand)[f"{stage} {kind}"]
    refused = cell["returned between"].startswith("WindowError")
    assert refused == ((stage, kind) != (0, "fp32")), cell


@on_two_ranks
def optimizers_with_schedulers(folder):
    """By stage and order: what torch warns of, how often the optimizer was stepped, whether it is free in the end."""
    results = {}
    for stage, order in product((0, 1, 3), ("before", "in initialize", "after")):
        model = perceptron()
        client = torch.optim.SGD(model.parameters(), lr=0.5)
        steps = []
        client.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        made = LambdaLR(client, lambda n: 0.5**n) if order == "before" else None
        keywords = {"lr_scheduler": lambda o: LambdaLR(o, lambda n: 0.5**n)} if order == "in initialize" else {}
        engine, *_ = ds_parity.initialize(
            model=model, model_parameters=model.parameters(), optimizer=client, config=extended(stage), **keywords
        )
        made = LambdaLR(client, lambda n: 0.5**n) if order == "after" else made
        steps.clear()

        def after(engine=engine, made=made):
            if made is not None and not engine.window.passes:
                made.step()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(engine, after=after)
        rate, taken = client.param_groups[0]["lr"], len(steps)
        engine.destroy()
        del engine, after
        gc.collect()
        said = [str(one.message) for one in caught if "lr_scheduler" in str(one.message)]
        results[f"{stage} {order}"] = [said, rate, taken, answer(client.step)]
    return results


@pytest.mark.parametrize(("stage", "order"), product((0, 1, 3), ("before", "in initialize", "after")))
def test_schedulers_count_the_engines_steps_and_a_destroyed_engine_leaves_the_optimizer_free(two_ranks, stage, order):
    said, rate, taken, last = two_ranks.of(optimizers_with_schedulers)[f"{stage} {order}"]
    assert not said
    assert (rate, taken) == (0.125, 2)
    assert "WindowError" not in last


# Parameters that the engine was not built with.


class Growing(torch.nn.Module):
    """One layer; another one may come."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 1, bias=False), None
        torch.nn.init.zeros_(self.first.weight)

    def grow(self):
        self.second = torch.nn.Linear(4, 1, bias=False).to(self.first.weight.device)
        torch.nn.init.zeros_(self.second.weight)
        return [self.second.weight]

    def replace(self):
        self.first = torch.nn.Linear(4, 1, bias=False).to(self.first.weight.device)
        return [self.first.weight]

    def grow_frozen(self):
        for one in self.grow():
            one.requires_grad_(False)

    def assign(self):
        self.first.weight = torch.nn.Parameter(torch.zeros_like(self.first.weight))
        return [self.first.weight]

    def forward(self, x, *numbers):
        layers = [layer for layer in (self.first, self.second) if layer is not None]
        return sum(layers[number](x).sum() for number in numbers or range(len(layers)))


def built(model, parameters, stage, passes=4):
    config = {**extended(stage), "gradient_accumulation_passes": passes}
    config["ds_parity"] = {"exchange_timeout": 20.0}
    client = torch.optim.SGD(parameters, lr=1.0)
    return ds_parity.initialize(model=model, model_parameters=parameters, optimizer=client, config=config)[0]


def run(engine, *numbers, passes=2):
    for _ in range(passes):
        engine.backward(engine(ones(engine), *numbers))
        engine.step()


HOWS = ("grow", "replace", "assign")


@on_two_ranks
def parameters_that_come_later(folder):
    """By stage and how: what the window is answered with; in one case rank 1 alone has changed its model."""
    results = {}
    for stage, how, where in [*product(STAGES, HOWS, ["both"]), (0, "grow", "rank 1"), (1, "grow", "rank 1")]:
        model = Growing()
        engine = built(model, list(model.parameters()), stage)
        run(engine)
        if where == "both" or dist.get_rank():
            getattr(model, how)()
        results[f"{stage} {how} {where}"] = from_all(answer(lambda engine=engine: run(engine)))
        engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "how"), product(STAGES, HOWS))
def test_a_parameter_that_the_engine_was_not_built_with_is_not_left_out_in_silence(two_ranks, stage, how):
    name = "second.weight" if how == "grow" else "first.weight"
    for said in two_ranks.of(parameters_that_come_later)[f"{stage} {how} both"]:
        assert said.startswith(f"WindowError: {name}: not in the model when its engine was built"), said
        assert "build a new engine" in said


@on_two_ranks
def frozen_parameters_that_come_later(folder):
    """By stage: what the window is answered with, where the newcomer is used and where it is not; and its weights."""
    results = {}
    for stage, used in product(STAGES, (True, False)):
        model = Growing()
        engine = built(model, list(model.parameters()), stage)
        run(engine)
        model.grow_frozen()
        said = answer(lambda engine=engine, used=used: run(engine, *() if used else (0,)))
        with deepspeed.zero.GatheredParameters([model.first.weight]):
            results[f"{stage} {used}"] = from_all([said, model.first.weight[0, 0].item()])
        engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "used"), product(STAGES, (True, False)))
def test_a_frozen_parameter_that_comes_later_is_let_alone_below_zero_3_and_refused_there_before_the_step(
    two_ranks, stage, used
):
    for said, moved in two_ranks.of(frozen_parameters_that_come_later)[f"{stage} {used}"]:
        if stage == 3:
            assert said.startswith("WindowError: second.weight: not in the model when its engine was built, so that Z")
            assert "also where it is frozen" in said
        else:
            assert not said.startswith("WindowError"), said
        assert moved == (-1 if stage == 3 else -2)


def overlapping(model, first, second):
    for _ in range(2):
        for number, engine in enumerate((first, second)):
            other = (model.second, model.first)[number]
            other.requires_grad_(False)
            engine.backward(engine(ones(engine), number))
            engine.step()
            other.requires_grad_(True)


@on_two_ranks
def two_engines_over_one_model(folder):
    """Each trains one layer, and their windows overlap: what the second is answered with."""
    results = {}
    for stages in [*((stage, stage) for stage in STAGES), (0, 1), (1, 0)]:
        model = Growing()
        model.grow()
        layers = (model.first, model.second)
        first, second = (built(model, [layer.weight], stage) for layer, stage in zip(layers, stages, strict=True))

        results["".join(map(str, stages))] = from_all(
            answer(lambda pair=(first, second), model=model: overlapping(model, *pair))
        )
        for engine in (first, second):
            engine.destroy()
    return results


def test_where_another_engine_over_the_model_has_cleared_gradients_the_error_says_so(two_ranks):
    results = two_ranks.of(two_engines_over_one_model)
    for stages in ("00", "01"):
        for said in results[stages]:
            assert said.startswith("WindowError: gradients were changed outside of engine.backward()"), said
            assert "Causes: the step of another engine over this model, which on ZeRO stage 0 clears" in said
    for stages in ("11", "22", "33"):
        assert not any("Error" in said for said in results[stages]), results[stages]


class _Headed(torch.nn.Module):
    """A head of its own on a shared layer, which one of two such models trains."""

    def __init__(self, shared, trains):
        super().__init__()
        self.shared, self.head, self.trains = shared, torch.nn.Linear(8, 1), trains

    def forward(self, x):
        with torch.set_grad_enabled(self.trains):
            x = self.shared(x)
        return self.head(x).sum()


FAR = 50_000_000  # elements, DeepSpeed's own default


@on_two_ranks
def engines_that_fetch_ahead(folder):
    """On ZeRO 3: two engines over one layer step in turn; by whether they fetch ahead, what is raised."""
    results = {}
    for ahead in (FAR, 0):
        shared, engines = torch.nn.Linear(8, 8), []
        section = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": ahead}
        for trains in (True, False):
            model = _Headed(shared, trains)
            trained = list((model if trains else model.head).parameters())
            given = config(3, passes=2) | {"zero_optimization": section}
            engines.append(ds_parity.initialize(model=model, model_parameters=trained, config=given)[0])

        def run(engines=engines):
            for _ in range(3):
                for engine in engines:
                    engine.backward(engine(torch.ones(1, 8, device=engine.device)))
                    engine.step()

        results[str(ahead)] = from_all([answer(run), [engine.global_steps for engine in engines]])
        for engine in engines:
            engine.destroy()
    return results


def test_engines_over_one_model_that_fetch_its_weights_ahead_are_told_so(two_ranks):
    """tools/deepspeed_faults/engines_of_one_model.py: DeepSpeed's own error is a dictionary."""
    results = two_ranks.of(engines_that_fetch_ahead)
    for said, _ in results[str(FAR)]:
        assert said.startswith(
            "WindowError: a forward on ZeRO stage 3 needs a weight that is being fetched, and not"
        ), said
        assert "Set zero_optimization.stage3_prefetch_bucket_size to 0 in each of these engines" in said
    assert results["0"] == [["nothing was raised", [3, 3]]] * 2


@pytest.mark.parametrize("stage", [0, 1])
def test_a_parameter_that_came_on_one_rank_is_told_to_the_others(two_ranks, stage):
    others, own = two_ranks.of(parameters_that_come_later)[f"{stage} grow rank 1"]
    assert own.startswith("WindowError: second.weight: not in the model")
    assert others.startswith("RankDesyncError")
    assert "second.weight" in others


@on_two_ranks
def parameters_of_somebody(folder):
    """Parameters that came later and are in an optimizer: in that of ZeRO 0, or in another engine's."""
    model = Growing()
    engine = built(model, list(model.parameters()), 0)
    run(engine)
    engine.optimizer.add_param_group({"params": model.grow(), "lr": 2.0})
    results = {"added": [answer(lambda: run(engine)), [values[0] for values in weights(engine)]]}
    engine.destroy()
    model = Growing()
    actor = built(model, list(model.parameters()), 1)
    critic = built(model, model.grow(), 1, passes=8)

    def both():
        for _ in range(4):
            for trained, number in ((critic, 1), (actor, 0)):
                trained.backward(trained(ones(trained), number))
                trained.step()

    results["another's"] = [answer(both), [values[0] for values in weights(actor)]]
    for trained in (actor, critic):
        trained.destroy()
    return results


def test_a_parameter_that_came_later_may_be_in_a_group_or_in_another_engine(two_ranks):
    results = two_ranks.of(parameters_of_somebody)
    assert results["added"] == ["nothing was raised", [-2, -2]]
    assert results["another's"] == ["nothing was raised", [-2, -1]]


# A default device that is not the host's.


class Elsewhere:
    """Sets the default device while ours run: `meta` holds no numbers, so that whoever counts on it fails."""

    def __enter__(self):
        torch.set_default_device("meta")

    def __exit__(self, *_):
        torch.set_default_device(None)


def train_elsewhere(engine, where):
    """Two windows through passes(), the default device set around every call of ours."""
    stream = [ds_parity.MicroBatch({}, rollouts=counts[dist.get_rank()]) for counts in PASSES]
    batches = engine.passes(iter(stream), lookahead=2)
    for at in range(len(PASSES)):
        with where():
            next(batches)
        loss = loss_of(engine, engine, 2 * at + dist.get_rank())
        with where():
            engine.record("reward", 1.5, 2)
            engine.record("each", torch.tensor([1.0, 2.0], device="cpu"))
            engine.backward(loss)
            engine.step()
    with where():
        assert next(batches, None) is None
        advantages = engine.group_advantages(["a", "b"], [1.0, float(dist.get_rank())])
    return [weights(engine), engine.last_step.metrics, engine.last_step.loss, advantages]


class Here:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


@on_two_ranks
def default_devices(folder):
    """By stage: what a run with another default device ends in, and whether it came to the same."""
    results = {}
    for stage in STAGES:
        engine, _ = engine_of(stage)
        right = train_elsewhere(engine, Here)
        engine.destroy()
        made = []

        def play(stage=stage, made=made):
            engine = built_elsewhere(ds_parity.initialize, extended(stage))
            made.append(train_elsewhere(engine, Elsewhere))
            engine.destroy()

        results[f"{stage}"] = [answer(play), made == [right]]
        if not made:
            bare = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
            bare["zero_allow_untested_optimizer"] = True
            said = answer(lambda bare=bare: built_elsewhere(deepspeed.initialize, bare).destroy())
            results[f"{stage} bare"] = said
        torch.set_default_device(None)
    return results


def built_elsewhere(initialize, config):
    """An engine that was built with another default device."""
    model = perceptron()
    client = torch.optim.SGD(model.parameters(), lr=0.5)
    given = {"model": model, "model_parameters": model.parameters(), "optimizer": client}
    with Elsewhere():
        engine, *_ = initialize(config=config, **given)
    return engine


NO_DATA = "NotImplementedError: Cannot copy out of meta tensor; no data!"


def test_a_default_device_is_not_where_ranks_talk(two_ranks, stage):
    found = two_ranks.of(default_devices)
    if is_older(installed()) and found.get(f"{stage} bare") == found[stage][0] == NO_DATA:
        pytest.skip(f"bare DeepSpeed builds no engine with another default device: {NO_DATA}")
    assert found[stage] == ["nothing was raised", True]


# Losses that have nothing of the model in them.


@on_two_ranks
def foreign_losses(folder):
    """By stage: what a pass of such a loss is answered with, and how far the weights move in its window."""
    results = {}
    for stage in STAGES:
        model = Pair()
        engine = built(model, list(model.parameters()), stage)

        def play(engine=engine):
            engine.backward(engine(ones(engine), 0, 1))
            engine.step()
            engine.backward(torch.zeros((), requires_grad=True) * 1)
            engine.step()

        results[f"{stage}"] = [from_all(answer(play)), [values[0] for values in weights(engine)]]
        engine.destroy()
    return results


def test_a_loss_with_nothing_of_the_model_has_no_gradient_or_is_refused_with_a_reason(two_ranks, stage):
    said, moved = two_ranks.of(foreign_losses)[stage]
    if stage == "2":
        assert all(one.startswith("WindowError: the loss has nothing of the model in it") for one in said), said
    else:
        assert said == ["nothing was raised"] * 2
        assert moved == [-0.5, -0.5]
