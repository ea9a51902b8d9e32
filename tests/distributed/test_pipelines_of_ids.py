"""Pipelines that checkpoint the activations of layers whose inputs need no gradient, such as ids of tokens."""

import functools

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ds_parity
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks, by_length, either, on_two_ranks
from tests.distributed.test_pipelines import SHARDED, alone_in_the_process, config

pytestmark = pytest.mark.ranks

WORDS, WIDTH = 11, 6
WINDOWS = [[[2, 1], [3]], [[1], [2, 2]], [[3, 1], [1, 1]]]


class Words(nn.Embedding):
    """Turns ids into vectors."""

    def __init__(self, *, frozen=False):
        torch.manual_seed(0)
        super().__init__(WORDS, WIDTH)
        self.weight.requires_grad_(not frozen)


class Linear(nn.Linear):
    """Begins with numbers of its own, whichever stage builds it."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(WIDTH, WIDTH)


class Gain(nn.Module):
    """A layer that nobody checkpoints."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return x * self.by


def scores(words, x):
    return x @ words.weight.t()


def linear(count):
    return [LayerSpec(Linear, seed) for seed in range(1, count + 1)]


def tied():
    """A language model whose head is the embedding, used by a function."""
    first, head = (TiedLayerSpec("words", Words, forward_fn=it) for it in (None, scores))
    return [first, *linear(2), head]


def frozen():
    return [LayerSpec(Words, frozen=True), *linear(2), LayerSpec(Gain)]


def longer():
    """On two stages the first ends with a layer that is not checkpointed."""
    first, *others = linear(4)
    return [LayerSpec(Words), first, LayerSpec(Gain), *others]


# By case: layers, stages, after how many layers an activation is kept, and which layers are checkpointed.
CASES = {
    "a tied head, each layer": (tied, 1, 1, None),
    "a tied head, three layers": (tied, 1, 3, None),
    "a tied head, all of a stage": (tied, 2, 1, None),
    "a frozen embedding": (frozen, 1, 1, ["Linear"]),
    "a frozen embedding, all of a stage": (frozen, 2, 1, None),
    "a layer that is left out": (longer, 2, 1, ["Words", "Linear"]),
    "nothing is checkpointed": (longer, 2, 0, None),
}


class Alone:
    """The model in fp64, in one process."""

    def __init__(self, layers, rate=0.1):
        self.weights, self._run, self._rate, tied_ones = {}, [], rate, {}
        for number, spec in enumerate(layers):
            key = getattr(spec, "key", None)
            layer = tied_ones.get(key) or spec.build().double()
            if key is not None:
                tied_ones[key] = layer
            name = f"tied_modules.{key}" if key else str(number)
            self.weights |= {f"{name}.{own}": one for own, one in layer.named_parameters()}
            by = getattr(spec, "forward_fn", None)
            self._run.append(layer if by is None else functools.partial(by, layer))
        self._trained = [one for one in self.weights.values() if one.requires_grad]

    def step(self, number, columns):
        """Step by a window; returns its loss and the norm of its gradient."""
        total, summed = sum(map(sum, columns)), 0.0
        for column, sizes in enumerate(columns):
            for index, size in enumerate(sizes):
                x, y = sample(column, number, index, size)
                for layer in self._run:
                    x = layer(x)
                loss = squares(x, y) * size / total
                loss.backward()
                summed += float(loss.detach())
        reached = [one for one in self._trained if one.grad is not None]
        norm = float(torch.stack([one.grad.pow(2).sum() for one in reached]).sum().sqrt())
        with torch.no_grad():
            for one in reached:
                one.sub_(self._rate * one.grad)
                one.grad = None
        return summed, norm


def sample(column, window, index, size):
    draw = torch.Generator().manual_seed(1000 * column + 100 * window + index)
    return torch.randint(0, WORDS, (size, 4), generator=draw), torch.randn(size, generator=draw)


def squares(outputs, labels):
    return (outputs.mean((-1, -2)) - labels).pow(2).mean()


def micro_batches(engine, window, sizes):
    device, column = get_accelerator().current_device_name(), engine.grid.get_data_parallel_id()
    for index, size in enumerate(sizes[column]):
        x, y = (one.to(device) for one in sample(column, window, index, size))
        yield ds_parity.MicroBatch({"inputs": x, "labels": y}, rollouts=size)


def off_from_alone(model, layers, keys, *, rate=0.1, windows=WINDOWS):
    """How far losses and norms are from those of the whole model, as shares, or this rank's weights, at most.

    Args:
        model: a PipelineModule of one stage or two.
        layers: returns the layers that it was made of.
        keys: a configuration with any optimizer, in whose place SGD steps.
        rate: its learning rate.
        windows: by window and column, the size of each micro-batch.
    """
    keys = {name: value for name, value in keys.items() if name != "scheduler"}
    keys["optimizer"] = {"type": "SGD", "params": {"lr": rate}}
    trained = [one for one in model.parameters() if one.requires_grad]
    engine = ds_parity.initialize(model=model, model_parameters=trained, config=keys)[0]
    alone, off = Alone(layers(), rate), []
    for number, columns in enumerate(windows):
        sizes = columns if model.num_stages == 1 else [[one for column in columns for one in column]]
        record, (loss, norm) = engine.train_window(micro_batches(engine, number, sizes)), alone.step(number, sizes)
        off += [abs(record.loss / loss - 1), abs(record.grad_norm / norm - 1)]
        named = engine.module.named_parameters()
        off += [float((one.double().cpu() - alone.weights[name]).abs().max()) for name, one in named]
    return max(off)


def distances(layers, stages, interval, checkpointed):
    model = deepspeed.PipelineModule(
        layers(), num_stages=stages, partition_method="uniform", loss_fn=squares, checkpointable_layers=checkpointed
    )
    keys = config(1, pipeline={"activation_checkpoint_interval": interval}, gradient_clipping=1e6)
    return off_from_alone(model, layers, keys)


OFTEN = ("a tied head, each layer", "a layer that is left out")
SELDOM = tuple(name for name in CASES if name not in OFTEN)


@on_two_ranks
@alone_in_the_process
def checkpointed_activations(folder):
    return {name: from_all(distances(*CASES[name])) for name in OFTEN}


@at_length_on_two_ranks
@alone_in_the_process
def checkpointed_activations_at_length(folder):
    return {name: from_all(distances(*CASES[name])) for name in SELDOM}


@pytest.fixture
def of_cell(request, cell):
    """How far off the ranks of a case are."""
    usual, at_length = checkpointed_activations, checkpointed_activations_at_length
    return either(request, usual, at_length, seldom=cell in SELDOM)[cell]


@pytest.mark.parametrize("cell", by_length(OFTEN, SELDOM, "two_ranks"))
def test_trained_layers_have_their_gradient_whatever_comes_to_them(of_cell, cell):
    """See tools/deepspeed_faults/checkpointed_over_ids.py."""
    assert max(of_cell) <= 1e-6


class InAList(nn.Module):
    """Takes and gives a list with a dict in it."""

    def __init__(self, seed, role=""):
        super().__init__()
        torch.manual_seed(seed)
        self.own, self.role = nn.Embedding(WORDS, WIDTH) if role == "first" else nn.Linear(WIDTH, WIDTH), role

    def forward(self, x):
        if self.role == "first":
            found = self.own(x)
            return [found, {"mean": found.mean(-1, keepdim=True)}]
        found, beside = torch.tanh(self.own(x[0])), x[1]["mean"]
        return found + beside if self.role == "last" else [found, {"mean": 1.1 * beside}]


class InTwo(nn.Module):
    """Takes and gives two activations."""

    def __init__(self, seed, role=""):
        super().__init__()
        torch.manual_seed(seed)
        self.own, self.role = nn.Embedding(WORDS, WIDTH) if role == "first" else nn.Linear(WIDTH, WIDTH), role

    def forward(self, x):
        found = self.own(x) if self.role == "first" else torch.tanh(self.own(x[0])) + x[1]
        return found if self.role == "last" else (found, 0.5 * found)


class Dropped(Linear):
    """Drops a part."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


def of_kind(layer):
    def layers():
        return [LayerSpec(layer, 0, "first"), LayerSpec(layer, 1), LayerSpec(layer, 2), LayerSpec(layer, 3, "last")]

    return layers


def dropped():
    return [LayerSpec(Words), *(LayerSpec(Dropped, seed) for seed in (1, 2)), LayerSpec(Gain)]


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
# By case: layers, stages, and what else is in the configuration.
SAME = {
    "in a list": (of_kind(InAList), 1, {}),
    "in two": (of_kind(InTwo), 2, {}),
    "in two, bf16": (of_kind(InTwo), 2, {"bf16": {"enabled": True}}),
    "autocast": (longer, 2, AUTOCAST),
    "autocast, tied": (tied, 1, AUTOCAST),
    "autocast, not reentrant": (longer, 2, {**AUTOCAST, "pipeline": {"use_reentrant": False}}),
    "dropped": (dropped, 1, {}),
    "dropped, two stages": (dropped, 2, {}),
    "dropped, fp32 sums": (dropped, 1, SHARDED["fp32-sums"]),
}


def weights_after(layers, stages, more, interval):
    """Some windows' weights."""
    deepspeed.utils.groups.mpu = None
    model = deepspeed.PipelineModule(layers(), num_stages=stages, partition_method="uniform", loss_fn=squares)
    checkpointed = {"activation_checkpoint_interval": interval, **more.get("pipeline", {})}
    keys = {**config(1, **more), "pipeline": checkpointed}
    engine = ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=keys)[0]
    torch.manual_seed(5)
    for number, columns in enumerate(WINDOWS):
        sizes = columns if stages == 1 else [[one for column in columns for one in column]]
        engine.train_window(micro_batches(engine, number, sizes))
    return {name: one.detach().clone() for name, one in engine.module.named_parameters()}


@at_length_on_two_ranks
@alone_in_the_process
def checkpointed_or_not(folder):
    """By case: how far weights are from those without checkpointing, and how far these have moved."""
    results = {}
    for name, case in SAME.items():
        due, begins = weights_after(*case, 0), dict(whole_of(*case[:2]))
        moved = max(float((due[it].float() - begins[it]).abs().max()) for it in due)
        for interval in (1, 2):
            found = weights_after(*case, interval)
            off = max(float((due[it] - found[it]).abs().max()) for it in due)
            results[f"{name}, {interval}"] = from_all([off, moved])
    return results


def whole_of(layers, stages):
    deepspeed.utils.groups.mpu = None
    model = deepspeed.PipelineModule(layers(), num_stages=stages, partition_method="uniform", loss_fn=squares)
    return ((name, one.detach().float()) for name, one in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("name", SAME)
def test_checkpointing_changes_no_bit_of_a_step(two_ranks_at_length, name, interval):
    for off, moved in two_ranks_at_length.of(checkpointed_or_not)[f"{name}, {interval}"]:
        assert off == 0.0
        assert moved > 1e-4
