"""A model whose state is not what is in it: hooks rename, convert and pack, and buffers have several names, or grow."""

import re

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

import ds_parity
from tests.distributed.cells import config
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class _Doubled(nn.Module):
    """Its state has one weight twice as large as it is."""

    def __init__(self, *, trained):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4), requires_grad=trained)
        self._register_state_dict_hook(self._double)
        self.register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _double(module, state, prefix, _):
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def _halve(module, state, prefix, *_):
        if f"{prefix}weight" in state:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2

    def forward(self, x):
        return x * self.weight


class _Renamed(nn.Module):
    """Its state has names of an older release."""

    def __init__(self, *, trained):
        super().__init__()
        self.new = nn.Linear(4, 4).requires_grad_(trained)
        self.register_buffer("new_mean", torch.randn(4))
        self._register_state_dict_hook(self._older)
        self.register_load_state_dict_pre_hook(self._newer)

    @staticmethod
    def _older(module, state, prefix, _):
        for name in [one for one in state if one.startswith(f"{prefix}new")]:
            state[name.replace(f"{prefix}new", f"{prefix}old")] = state.pop(name)

    @staticmethod
    def _newer(module, state, prefix, *_):
        for name in [one for one in state if one.startswith(f"{prefix}old")]:
            state[name.replace(f"{prefix}old", f"{prefix}new")] = state.pop(name)

    def forward(self, x):
        return self.new(x) + self.new_mean


class _Packed(nn.Module):
    """Two buffers, and beside them two weights, lie in one tensor of its state."""

    def __init__(self, *, weights):
        super().__init__()
        self.weights = weights
        if weights:
            self.one, self.other = (nn.Parameter(torch.randn(4)) for _ in range(2))
        else:
            self.register_buffer("one", torch.randn(4))
            self.register_buffer("other", torch.randn(4))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}packed"] = torch.cat([self.one.detach().flatten(), self.other.detach().flatten()])

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        packed = state.get(f"{prefix}packed")
        if packed is not None:
            with torch.no_grad():
                self.one.copy_(packed[:4])
                self.other.copy_(packed[4:])
        elif not self.weights:
            missing.append(f"{prefix}packed")

    def forward(self, x):
        return x * self.one + self.other


class _Twice(nn.Module):
    """One norm, with its statistics, under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.second(self.first(x))


class _Grows(nn.Module):
    """A queue of what was seen, which takes the size that is loaded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.randn(1, 4))
        self.register_load_state_dict_pre_hook(self._resize)

    @staticmethod
    def _resize(module, state, prefix, *_):
        if f"{prefix}seen" in state:
            module.seen = module.seen.new_zeros(state[f"{prefix}seen"].shape)

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach()[:1]])
        return x + self.seen.mean(0)


class _Slashes(nn.Module):
    """An adapter with a slash in its name, and one whose name begins so."""

    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleDict({"a/b": nn.Linear(4, 4), "a": nn.Linear(4, 4)})

    def forward(self, x):
        return self.adapters["a"](self.adapters["a/b"](x))


class _Later(nn.Module):
    """A buffer that is there from the first forward on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0) + torch.randn(4)
        return x + self.mean


PARTS = {
    "a trained weight is doubled": lambda: _Doubled(trained=True),
    "a frozen weight is doubled": lambda: _Doubled(trained=False),
    "trained weights are renamed": lambda: _Renamed(trained=True),
    "frozen weights are renamed": lambda: _Renamed(trained=False),
    "weights are packed": lambda: _Packed(weights=True),
    "buffers are packed": lambda: _Packed(weights=False),
    "a norm has two names": _Twice,
    "a buffer grows": _Grows,
    "names have slashes": _Slashes,
}
WHOLE, ALONE, UNIVERSAL = "whole", "weights alone", "universal"
# Packed weights are empty on ZeRO 3 when they are packed, and a whole load is refused there, by torch.
CELLS = [
    (stage, way, name)
    for stage in (2, 3)
    for way in (WHOLE, ALONE, UNIVERSAL)
    for name in PARTS
    if (stage, way, name) != (3, WHOLE, "weights are packed")
]


class _Model(nn.Module):
    def __init__(self, part, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.part = nn.Linear(4, 4), part()

    def forward(self, x):
        return self.part(self.layer(x)).pow(2).mean()


def _engine(stage, part, seed, *, universal=False):
    model = _Model(part, seed)
    keys = {**config(stage, "fp32", 2, "AdamW"), "checkpoint": {"load_universal": universal}}
    trained = [one for one in model.parameters() if one.requires_grad]
    return ds_parity.initialize(model=model, model_parameters=trained, config=keys)[0]


def _x(engine):
    """The same on each rank, of which a universal checkpoint has the first one's buffers."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(engine.device)


def _held(engine):
    module = engine.module
    with GatheredParameters([one for one in module.parameters() if hasattr(one, "ds_id")]):
        named = [*module.named_parameters(), *module.named_buffers()]
        return {name: value.detach().tolist() for name, value in named}


def _saved(stage, part, path):
    engine = _engine(stage, part, 0)
    engine.backward(engine(_x(engine)), rollouts=1)
    engine.step()
    engine.save_checkpoint(path)
    said = converted(path, 1)
    assert said in (None, "nothing was raised"), said
    return engine


def _loaded(way, stage, part, path, **more):
    engine = _engine(stage, part, 1, universal=way == UNIVERSAL)
    options = {"load_optimizer_states": way != ALONE, **more}
    tag = "universal" if way == UNIVERSAL else "global_step1"
    said = refusal(lambda: engine.load_checkpoint(path, tag=tag, **options))
    return said, engine


@at_length_on_two_ranks
def states_of_hooks(folder):
    """By stage, way and part: what a load ends in, and by which names another engine's model is not what was saved."""
    results = {}
    for stage in (2, 3):
        for number, (name, part) in enumerate(PARTS.items()):
            path = f"{folder}/{stage}-{number}"
            saved = _held(_saved(stage, part, path))
            for way in (WHOLE, ALONE, UNIVERSAL):
                if (stage, way, name) not in CELLS:
                    continue
                said, engine = _loaded(way, stage, part, path)
                held = _held(engine)
                results[f"{stage} {way} {name}"] = [said, [one for one in saved if held.get(one) != saved[one]]]
    return from_all(results)


@pytest.mark.parametrize(("stage", "way", "name"), CELLS)
def test_a_model_has_what_was_saved(two_ranks_at_length, stage, way, name):
    for found in two_ranks_at_length.of(states_of_hooks):
        assert found[f"{stage} {way} {name}"] == ["nothing was raised", []]


class _More(nn.Module):
    """A frozen weight and a buffer more."""

    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mean", torch.randn(4))

    def forward(self, x):
        return x + self.more + self.mean


@at_length_on_two_ranks
def states_with_more(folder):
    """By stage, what was saved and strictness: what a universal load ends in where the model has less."""
    results = {}
    for stage in (2, 3):
        for name, saved, own in (("later", _Later, _Later), ("more", _More, nn.Identity)):
            path = f"{folder}/{stage}-{name}"
            _saved(stage, saved, path)
            for strict in (True, False):
                said, _ = _loaded(UNIVERSAL, stage, own, path, load_module_strict=strict)
                results[f"{stage} {name} {strict}"] = from_all(said)
    return results


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("name", "has"), [("later", "part.mean, and"), ("more", r"part\.(mean|more), and 1 more, and")]
)
def test_what_a_model_has_not_is_refused_and_not_left_out(two_ranks_at_length, stage, name, has):
    found = two_ranks_at_length.of(states_with_more)
    for said in found[f"{stage} {name} True"]:
        assert re.match(f"CheckpointError: the universal checkpoint has {has} this model has no buffer", said)
    assert found[f"{stage} {name} False"] == ["nothing was raised"] * 2
